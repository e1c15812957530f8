"""Tokenizers of published models: byte-level BPE (Qwen2 to Qwen3, Llama-3, SmolLM, OLMo 2) and SentencePiece's BPE with
byte fallback (Llama-2, Mistral, Gemma).

Special tokens in a template become their ids, as in transformers with `add_special_tokens=False`. In problems and model
output they stay text (`Tokenizer.as_text`).
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from tango_jax.runtime.checks import read_json_object
from tango_jax.text.bpe import METASPACE, read_sentencepiece
from tango_jax.text.character_tokenizer import CONTRACT_SYMBOLS
from tango_jax.text.tokenizer import Tokenizer

_MARK = re.compile(r"<[^<>\s]+>|\[[^][\s]+\]")  # such as <|im_end|> or [PAD]
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# "Today" for templates that state a date (Llama 3.1's default): a prompt must not change with the calendar.
CHAT_DATE = "26 Jul 2024"
_ANSWER = "an answer"  # placeholder that shows where a template puts the answer
# Letters, spaces, digits, an accent, Chinese, an emoji, LaTeX: our decoding must agree with the library's.
_PROBE = "Two  words\n\t12 \u00e9 \u6570\u5b66 \U0001f642 \\frac{1}{2}$ <step>."


def load_hf_tokenizer(
    folder: str | Path, vocab_size: int, use_chat: bool = False, always_bos: bool = False
) -> Tokenizer:
    """Load tokenizer.json of a Hugging Face folder, or else the SentencePiece model tokenizer.model.

    `vocab_size`: rows of the embedding; ids beyond the tokenizer's stand for no text. `use_chat`: wrap every prompt in
    the chat template. `always_bos`: prompts begin with the tokenizer's BOS if it names one, as in TRL, also where it
    adds none itself. Raises ValueError: files are missing, broken, unsupported or contradict each other.
    """
    folder = Path(folder)
    settings = _read_json(folder / "tokenizer_config.json")
    backend = load_backend(folder)
    _add_listed_tokens(backend, settings, folder, vocab_size)
    chat = _chat_of_folder(folder, settings, backend) if use_chat else None
    return make_tokenizer(
        backend,
        vocab_size,
        bos_ids=_bos_ids(backend, settings, folder, always_bos),
        stop_ids=_stop_ids(backend, settings, folder),
        chat=chat,
        source=str(folder),
    )


class Chat(NamedTuple):
    wrap_fn: Callable[[str], str]  # formats text as the first user turn of a conversation, up to the answer's start
    end_ids: tuple[int, ...]  # the special token that closes the answer; empty if plain text closes it


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            return read_sentencepiece(folder / "tokenizer.model")
        raise ValueError(f"{folder} has neither tokenizer.json nor tokenizer.model: copy one from the model's page")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer ({error}): copy it from the model's page again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_listed_tokens(backend: tokenizers.Tokenizer, settings: dict, folder: Path, vocab_size: int) -> None:
    """Add the tokens that only `added_tokens_decoder` or added_tokens.json name, such as the marks of chat turns. Ids
    beyond the embedding, often for padding, are left out."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        listed = {int(token): tokenizers.AddedToken(record["content"],
                                                    **{flag: record[flag] for flag in flags if flag in record})
                  for token, record in (settings.get("added_tokens_decoder") or {}).items()}
        if not listed:
            listed = {int(token): tokenizers.AddedToken(text, special=bool(_MARK.fullmatch(text)))
                      for text, token in _read_json(folder / "added_tokens.json").items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} has added tokens of an unknown form in tokenizer_config.json or added_tokens.json ({error!r}): "
            "copy both from the model's page again"
        ) from error
    for token, added in sorted(listed.items()):
        text = added.content
        if token >= vocab_size or backend.token_to_id(text) is not None:
            continue
        backend.add_tokens([added])
        if backend.token_to_id(text) != token:
            raise ValueError(
                f"{folder} lists {text!r} as token {token} beside a tokenizer in which it would be "
                f"{backend.token_to_id(text)}: the files are not of one model; copy all of them from the model's page"
            )


def make_tokenizer(
    backend: tokenizers.Tokenizer,
    vocab_size: int,
    bos_ids: Sequence[int],
    stop_ids: Sequence[int],
    chat: Chat | None = None,
    source: str = "the tokenizer",
) -> Tokenizer:
    """Reduce a `tokenizers` object to what the loop needs, and check that our decoding agrees with the library's.

    The first of `stop_ids` ends the responses of stage 1. With `chat` it closes the template's answers; a base model's
    `stop_ids` may lack it. Raises ValueError: ids outside of `vocab_size`, or tokens of an unsupported family.
    """
    added = backend.get_added_tokens_decoder()
    controls = {token for token, entry in added.items() if _is_control(entry)}
    # Gemma 3's small models have no embedding row for the mark of images: such marks cannot be used.
    used = (token for token in backend.get_vocab(with_added_tokens=True).values() if token not in controls)
    size = max(used, default=-1) + 1
    if size > vocab_size:
        raise ValueError(
            f"{source} has {size} tokens but the model has {vocab_size} rows in its embedding: use the tokenizer that "
            "was published with the model"
        )
    stop_ids = [*(chat.end_ids if chat else ()), *stop_ids]
    outside = [token for token in (*bos_ids, *stop_ids) if not 0 <= token < vocab_size]
    if outside or not stop_ids:
        raise ValueError(
            f"{source} has stop ids {list(stop_ids)} and BOS ids {list(bos_ids)}; it needs a stop id, and each must be "
            f"below {vocab_size}: set eos_token_id in generation_config.json"
        )
    if backend.id_to_token(stop_ids[0]) is None:
        raise ValueError(
            f"{source} has no token {stop_ids[0]}, which ends a response: copy all tokenizer files from the model's "
            "page, added_tokens.json too, or correct eos_token_id in generation_config.json"
        )
    token_bytes = _token_bytes(backend, vocab_size, source)

    def encode_fn(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    raw = b"".join(token_bytes[token] for token in encode_fn("a"))
    tokenizer = Tokenizer(
        encode_fn=encode_fn,
        token_bytes=token_bytes,
        bos_ids=tuple(bos_ids),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        strips_blank=raw == b" a" and backend.decode(encode_fn("a")) == "a",
        chat_fn=chat.wrap_fn if chat else None,
        special_texts=tuple(added[token].content for token in sorted(controls)),
    )
    ids = encode_fn(_PROBE)
    shown = [token for token in ids if token not in controls]  # the library would leave out <step> too, if special
    if tokenizer.decode(ids) != backend.decode(shown, skip_special_tokens=False):
        raise ValueError(
            f"{source} decodes {_PROBE!r} to {backend.decode(ids)!r}, but the bytes of its tokens decode to "
            f"{tokenizer.decode(ids)!r}: only byte-level BPE and SentencePiece BPE with byte fallback are supported"
        )
    return tokenizer


def make_chat(
    backend: tokenizers.Tokenizer, template: str | None, special_tokens: dict[str, str], source: str
) -> Chat:
    """`wrap_fn` writes the special tokens, BOS included if the template has it. Raises ValueError: there is no
    template, or it does not accept one user turn."""
    from transformers import PreTrainedTokenizerFast  # takes a second to import, and only chat prompts need it

    if not template:
        raise ValueError(f"{source} has no chat template: use raw prompts, or the instruction-tuned model's tokenizer")
    renderer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special_tokens)

    def wrap_fn(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                            date_string=CHAT_DATE)

    try:
        text = wrap_fn("question")
    except Exception as error:  # a template is a program: it can fail in any way
        raise ValueError(f"the chat template of {source} fails on one user turn ({error}): use raw prompts") from error
    if "question" not in text:
        raise ValueError(f"the chat template of {source} leaves the user's turn out ({text!r}): use raw prompts")
    return Chat(wrap_fn, _answer_end(backend, renderer))


def _answer_end(backend: tokenizers.Tokenizer, renderer) -> tuple[int, ...]:
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = renderer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template is a program; one that accepts only a user turn is still good enough for prompts
        return ()
    _, found, rest = text.rpartition(_ANSWER)
    ids = backend.encode(rest.lstrip(), add_special_tokens=False).ids if found else []
    added = backend.get_added_tokens_decoder()
    return tuple(ids[:1]) if ids and ids[0] in added and added[ids[0]].special else ()


def _chat_of_folder(folder: Path, settings: dict, backend: tokenizers.Tokenizer) -> Chat:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := _token_text(settings.get(name)))}
    return make_chat(backend, _chat_template(folder, settings), special, str(folder))


def _token_bytes(backend: tokenizers.Tokenizer, vocab_size: int, source: str) -> tuple[bytes, ...]:
    """Empty for control tokens and for ids that the tokenizer lacks."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    decoders = [state, *state.get("decoders", [])]
    if any(decoder.get("type") == "ByteLevel" for decoder in decoders):
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        to_bytes = functools.partial(_byte_level_bytes, letters)
    elif METASPACE in json.dumps(decoders, ensure_ascii=False):
        to_bytes = _metaspace_bytes
    else:
        raise ValueError(
            f"{source} has a decoder of type {state.get('type')}: only byte-level BPE and SentencePiece BPE with byte "
            "fallback are supported"
        )
    out = [b""] * vocab_size
    added_tokens = backend.get_added_tokens_decoder()
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if token not in added_tokens:
            out[token] = to_bytes(piece)
    for token, added in added_tokens.items():
        if not _is_control(added):  # the library decodes added tokens, too: Gemma has runs of blanks among them
            out[token] = _metaspace_bytes(added.content) if to_bytes is _metaspace_bytes else added.content.encode()
    return tuple(out)


def _is_control(added: tokenizers.AddedToken) -> bool:
    """The tags of the text contract are text even where they are special tokens."""
    return added.special and added.content not in CONTRACT_SYMBOLS


def byte_letters() -> str:
    """GPT-2's alphabet: letters for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256))


def _byte_level_bytes(letters: dict[str, int], piece: str) -> bytes:
    if all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return piece.encode()


def _metaspace_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(METASPACE, " ").encode()


def _bos_ids(backend: tokenizers.Tokenizer, settings: dict, folder: Path, always: bool) -> tuple[int, ...]:
    """By `add_bos_token`, or else by the tokenizer's post-processor. `always`: by whether there is a BOS."""
    settings = _read_json(folder / "special_tokens_map.json") | settings
    adds_bos = settings.get("bos_token") is not None if always else settings.get("add_bos_token")
    if adds_bos is None:
        bare = backend.encode("a", add_special_tokens=False).ids
        ids = backend.encode("a", add_special_tokens=True).ids
        return tuple(ids[: next((k for k in range(len(ids)) if ids[k : k + len(bare)] == bare), 0)])
    if not adds_bos:
        return ()
    return (_id_of(backend, _token_text(settings.get("bos_token")), "bos_token", folder),)


def _stop_ids(backend: tokenizers.Tokenizer, settings: dict, folder: Path) -> tuple[int, ...]:
    """First the tokenizer's, with which stage 1 ends responses, then the model's. Llama-3.1-Instruct's generation
    config lists <|end_of_text|> first, but its turns close with <|eot_id|>."""
    settings = _read_json(folder / "special_tokens_map.json") | settings
    own_text = _token_text(settings.get("eos_token"))
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            listed = tuple(ids) if isinstance(ids, list) else (ids,)
            own = None if own_text is None or not listed else backend.token_to_id(own_text)
            return listed if own is None else (own, *listed)
    return (_id_of(backend, own_text, "eos_token", folder),)


def _id_of(backend: tokenizers.Tokenizer, text: str | None, name: str, folder: Path) -> int:
    token = None if text is None else backend.token_to_id(text)
    if token is None:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} names {text!r} as {name}, which is not a token: set {name} there, or "
            "eos_token_id in generation_config.json"
        )
    return token


def _token_text(token: str | dict | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _chat_template(folder: Path, settings: dict) -> str | None:
    """The chat template; where there are several, the default one."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8-sig")
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def has_chat_template(folder: str | Path) -> bool:
    """Raises ValueError if files are broken."""
    folder = Path(folder)
    return bool(_chat_template(folder, _read_json(folder / "tokenizer_config.json")))


def _read_json(path: Path) -> dict:
    return read_json_object(path, "copy it from the model's page again") if path.is_file() else {}
