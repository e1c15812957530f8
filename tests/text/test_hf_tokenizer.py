"""Tokenizers of Hugging Face folders: ids and text against transformers, bytes, BOS and stop ids, chat, bad folders."""

import dataclasses
import json
import unicodedata

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from support.small_tokenizers import (
    BYTE_PIECES,
    CHAT_TEMPLATE,
    CONTROLS,
    byte_level,
    metaspace,
    random_text,
    sentencepiece_model,
    write_folder,
)
from tango_jax.records import Problem
from tango_jax.text.character_tokenizer import CONTRACT_SYMBOLS
from tango_jax.text.hf_tokenizer import byte_letters, load_hf_tokenizer, make_tokenizer
from tango_jax.text.templates import verifier_prompt

FAMILIES = ("qwen2", "llama3", "smollm", "llama2", "mistral", "gemma")
BYTE_LEVEL = FAMILIES[:3]
ROWS = 700  # of the models' embeddings: more than any of these tokenizers has tokens
REPLACED = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    out = {}
    for family in FAMILIES:
        settings = {"eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": CHAT_TEMPLATE}
        if family == "llama3":  # its config says nothing of BOS: the post-processor adds it
            eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
            settings = {"bos_token": CONTROLS[0], "eos_token": eos, "chat_template": CHAT_TEMPLATE}
        if family in ("llama2", "mistral", "gemma"):
            settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
        backend = byte_level(family) if family in BYTE_LEVEL else metaspace(family)
        out[family] = write_folder(root / family, backend, settings)
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(folders, family):
    return load_hf_tokenizer(folders[family], ROWS)


@pytest.fixture(scope="module")
def reference(folders, family):
    return PreTrainedTokenizerFast.from_pretrained(folders[family])


def test_ids_and_text_of_random_unicode(tokenizer, reference, family):
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode_fn(text)
        assert ids == reference(text, add_special_tokens=False).input_ids
        assert tokenizer.encode_prompt(text) == reference(text).input_ids
        decoded, ends = tokenizer.decode_with_ends(ids)
        assert decoded == reference.decode(ids, skip_special_tokens=True)
        if family == "mistral" and text.startswith((" ", "\u2581")):
            continue  # its rule puts no blank before a text that has one, and takes that one away again
        text = unicodedata.normalize("NFC", text) if family == "qwen2" else text
        text = text if family in BYTE_LEVEL else text.replace("\u2581", " ")  # their letter for a blank
        assert decoded == text
        assert ends == sorted(ends) and (not ids or ends[-1] == len(text))


def test_ends_count_the_characters_whose_bytes_are_there(tokenizer):
    text = "\u6570 \U0001f642e\u0301x" * 3
    ids = tokenizer.encode_fn(text)
    whole, ends = tokenizer.decode_with_ends(ids)
    for k in range(len(ids)):
        data = b"".join(tokenizer.token_bytes[token] for token in ids[: k + 1])
        complete = data.decode("utf-8", "ignore")  # the bytes are a prefix of valid text: only its end can be missing
        complete = complete.removeprefix(" ") if tokenizer.strips_blank else complete
        assert len(complete) == ends[k] and whole.startswith(complete)


def test_sampled_ids_decode_as_the_library_does(tokenizer, reference):
    rng = np.random.default_rng(1)
    compared = 0
    for _ in range(300):
        ids = rng.integers(0, len(reference), rng.integers(1, 6)).tolist()
        text = tokenizer.decode(ids)
        if REPLACED not in text:  # the library marks every byte of what is no text, Python every broken character
            assert text == reference.decode(ids, skip_special_tokens=True)
            compared += 1
    assert compared > 50
    tokenizer.decode(range(ROWS))


def test_ids_without_a_token_stand_for_nothing(tokenizer, reference):
    assert tokenizer.vocab_size == ROWS > len(reference)
    assert set(tokenizer.token_bytes[len(reference) :]) == {b""}
    assert tokenizer.decode([ROWS - 1, *tokenizer.encode_fn("ab"), ROWS - 1]) == "ab"


def test_special_tokens_in_text_become_their_ids(tokenizer, reference, family):
    names = ["</s>"] if family in ("llama2", "mistral", "gemma") else ["<|im_end|>", "<tool_call>"]
    for name in names:
        ids = tokenizer.encode_fn(f"a{name} b")
        assert ids == reference(f"a{name} b", add_special_tokens=False).input_ids
        (token,) = {reference.convert_tokens_to_ids(name)} & set(ids)
        assert tokenizer.token_bytes[token] == (name.encode() if name == "<tool_call>" else b"")


def test_model_text_holds_no_special_tokens(tokenizer, family):
    """A solution that spells out the end of a turn must not end one in the verifier's prompt."""
    special = "</s>" if family in ("llama2", "mistral", "gemma") else "<|im_end|>"
    prompt, _ = verifier_prompt("{problem}{num_steps}{solution}", tokenizer, Problem("p", f"q{special}", ""),
                                f"a{special}{special[1:]}b", 1, 10_000)
    controls = {token for token, text in enumerate(tokenizer.token_bytes) if not text}
    assert controls & set(tokenizer.encode_fn(special)) and not controls & set(prompt[len(tokenizer.bos_ids) :])
    assert tokenizer.as_text("x < y |> </step>") == "x < y |> </step>"


def test_bos_and_stop(tokenizer, family):
    assert bool(tokenizer.bos_ids) == (family in ("llama3", "llama2", "mistral", "gemma"))
    assert tokenizer.encode_response("a")[-1] == tokenizer.stop_ids[0]
    assert all(tokenizer.token_bytes[token] == b"" for token in (*tokenizer.bos_ids, *tokenizer.stop_ids))
    text = "<step>a</step>"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == tokenizer.decode(tokenizer.encode_response(text)) == text


def test_every_byte_has_a_token(tokenizer, family):
    singles = {piece for piece in tokenizer.token_bytes if len(piece) == 1}
    assert len(singles) == 256
    if family not in BYTE_LEVEL:
        assert tokenizer.token_bytes[3:259] == tuple(bytes([byte]) for byte in range(256)) and len(BYTE_PIECES) == 256


def test_the_byte_alphabet_is_that_of_the_library():
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert (letters[ord("a")], letters[ord(" ")], letters[ord("\n")], letters[0]) == ("a", "\u0120", "\u010a", "\u0100")
    for byte in range(0x80):
        assert decoders.ByteLevel().decode([letters[byte]]) == chr(byte)


# -------------------------------------------------------------------------------------------------- files of a folder


@pytest.mark.parametrize("generation, config, settings, stop_ids", [
    ({"eos_token_id": [7, 5, 7]}, {"eos_token_id": 4}, {"eos_token": "<|im_end|>"}, (2, 7, 5)),
    ({"eos_token_id": [0, 7, 2]}, {}, {"eos_token": "<|im_end|>"}, (2, 0, 7)),  # Llama-3.1-Instruct has it like this
    ({"eos_token_id": [7, 5]}, {"eos_token_id": 4}, {"eos_token": "no token"}, (7, 5)),
    ({"eos_token_id": 6}, {"eos_token_id": 4}, {}, (6,)),
    ({"temperature": 0.7}, {"eos_token_id": [4, 3]}, {"eos_token": "<|im_end|>"}, (2, 4, 3)),
    (None, {}, {"eos_token": "<|im_end|>"}, (2,)),
    (None, None, {"eos_token": {"content": "<|endoftext|>", "special": True}}, (0,)),
])
def test_where_stop_ids_come_from(tmp_path, generation, config, settings, stop_ids):
    folder = write_folder(tmp_path, byte_level("smollm"), settings, generation)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_hf_tokenizer(folder, ROWS)
    assert tokenizer.stop_ids == stop_ids
    assert tokenizer.encode_response("")[-1] == stop_ids[0]


@pytest.mark.parametrize("adds_bos, expected", [(True, (0,)), (False, ())])
def test_the_config_decides_on_bos(tmp_path, adds_bos, expected):
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": adds_bos}
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, byte_level("smollm"), settings), ROWS)
    assert tokenizer.bos_ids == expected


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_bare_sentencepiece_model(tmp_path, has_prefix):
    model = sentencepiece_model(add_dummy_prefix=has_prefix, user_defined_symbols=["[INST]"], control_symbols=["[X]"])
    folder = write_folder(tmp_path, None, {"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = load_hf_tokenizer(folder, ROWS)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert (tokenizer.bos_ids, tokenizer.stop_ids, tokenizer.strips_blank) == ((1,), (2,), has_prefix)
    rng = np.random.default_rng(2)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode_fn(text)
        assert ids == processor.encode(text), text
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")  # its letter for a blank
    (control,) = tokenizer.encode_fn("[X]")[-1:]
    assert control == processor.piece_to_id("[X]") and tokenizer.token_bytes[control] == b""
    assert tokenizer.token_bytes[processor.piece_to_id("[INST]")] == b"[INST]"


def test_an_old_folder_names_its_end_of_sequence_in_a_file_of_its_own(tmp_path):
    folder = write_folder(tmp_path, byte_level("smollm"), {}, {"eos_token_id": [0, 2]})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert load_hf_tokenizer(folder, ROWS).stop_ids == (2, 0)


# --------------------------------------------------------------------------------------------------------------- chat

# How published templates close a turn: Llama-3's, a base Qwen's, Llama-2's (after a blank), and one that uses text.
TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}CLOSE{% endfor %}"
CLOSED = [("<|im_end|>", (2, 0)), ("<|im_end|>\n", (2, 0)), (" {{ eos_token }}", (0,)), ("\n###", (0,)), ("", (0,)),
          ("{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}", (0,)),
          ("{% if m['role'] == 'assistant' %}{{ '<tool_call>' }}{% endif %}", (0,))]


@pytest.mark.parametrize("close, stop_ids", CLOSED)
def test_in_chat_a_response_ends_as_the_template_closes_an_answer(tmp_path, close, stop_ids):
    """Raw, with the tokenizer's own end of sequence; sampling stops at either."""
    settings = {"eos_token": "<|endoftext|>", "chat_template": TURNS.replace("CLOSE", close)}
    folder = write_folder(tmp_path, byte_level("smollm"), settings, {"eos_token_id": 0})
    raw, chat = load_hf_tokenizer(folder, ROWS), load_hf_tokenizer(folder, ROWS, use_chat=True)
    assert raw.stop_ids == (0,) and raw.encode_response("4")[-1] == 0
    assert chat.stop_ids == stop_ids and chat.encode_response("4") == [*raw.encode_response("4")[:-1], stop_ids[0]]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "list", "chat_template.jinja", "chat_template.json"])
def test_chat_prompts_are_those_of_transformers(tmp_path, folders, place):
    template = {"list": [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]}
    settings = {"bos_token": CONTROLS[0], "eos_token": "<|im_end|>"}
    if place in ("list", "tokenizer_config.json"):
        settings["chat_template"] = template.get(place, CHAT_TEMPLATE)
    folder = write_folder(tmp_path, byte_level("llama3"), settings)
    if place == "chat_template.jinja":
        (folder / place).write_text(CHAT_TEMPLATE, encoding="utf-8-sig")  # with the mark of some editors
    if place == "chat_template.json":
        (folder / place).write_text(json.dumps({"chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    tokenizer = load_hf_tokenizer(folder, ROWS, use_chat=True)
    reference = PreTrainedTokenizerFast.from_pretrained(folders["llama3"])
    messages = [{"role": "user", "content": "What is\n $2 + 2$?"}]
    ids = tokenizer.encode_prompt(messages[0]["content"])
    assert ids == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_ids[0]) == 1 and ids[0] == tokenizer.bos_ids[0]
    assert tokenizer.decode(ids) == "user\nWhat is\n $2 + 2$?\nassistant\n"
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.chat_fn(messages[0]["content"]) == text
    # Responses stay as they are, and a raw prompt knows nothing of the template.
    assert tokenizer.encode_response("4") == load_hf_tokenizer(folder, ROWS).encode_response("4")
    assert load_hf_tokenizer(folder, ROWS).encode_prompt("4") == [tokenizer.bos_ids[0], *tokenizer.encode_fn("4")]


def test_a_prompt_does_not_change_with_the_calendar(tmp_path):
    """As in Llama 3.2, whose template asks for today's date where it is given none."""
    template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    folder = write_folder(tmp_path, byte_level("smollm"), {"eos_token": "<|im_end|>", "chat_template": template})
    assert load_hf_tokenizer(folder, ROWS, use_chat=True).chat_fn("hi") == "26 Jul 2024 hi"


@pytest.mark.parametrize("template, words", [
    (None, ["no chat template", "raw prompts"]),
    ("{{ raise_exception('needs a system turn') }}", ["needs a system turn", "raw prompts"]),
    ("{% for m in", ["fails on one user turn"]),
    ("hello", ["leaves the user's turn out"]),
])
def test_templates_that_cannot_be_used(tmp_path, template, words):
    folder = write_folder(tmp_path, byte_level("smollm"), {"eos_token": "<|im_end|>", "chat_template": template})
    load_hf_tokenizer(folder, ROWS)
    with pytest.raises(ValueError) as error:
        load_hf_tokenizer(folder, ROWS, use_chat=True)
    assert all(word in str(error.value) for word in [str(tmp_path), *words]), error.value


# -------------------------------------------------------------------------------------------------------- bad folders


def word_level() -> Backend:
    backend = Backend(models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    return backend


@pytest.mark.parametrize("change_fn, rows, words", [
    (lambda folder: (folder / "tokenizer.json").unlink(), ROWS, ["neither tokenizer.json nor tokenizer.model"]),
    (lambda folder: (folder / "tokenizer.json").write_text("{"), ROWS, ["tokenizer.json is not a tokenizer"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text("{"), ROWS, ["tokenizer_config.json is not JSON"]),
    (lambda folder: (folder / "config.json").write_text("[1]"), ROWS, ["config.json holds a list"]),
    (lambda folder: word_level().save(str(folder / "tokenizer.json")), ROWS, ["WordPiece", "byte-level BPE"]),
    (lambda folder: None, 300, ["391 tokens", "300 rows"]),
    (lambda folder: (folder / "config.json").write_text('{"eos_token_id": 700}'), ROWS, ["[2, 700]", "below 700"]),
    (lambda folder: (folder / "config.json").write_text('{"eos_token_id": []}'), ROWS, ["needs a stop id"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), ROWS, ["None as eos_token"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}'), ROWS, ["'<eos>'"]),
    (lambda folder: (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}'), ROWS, ["as bos_token"]),
])
def test_bad_folders(tmp_path, change_fn, rows, words):
    folder = write_folder(tmp_path, byte_level("smollm"), {"eos_token": "<|im_end|>"})
    change_fn(folder)
    with pytest.raises(ValueError) as error:
        load_hf_tokenizer(folder, rows)
    assert all(word in str(error.value) for word in [str(tmp_path), *words]), error.value


@pytest.mark.parametrize("model, words", [
    (b"\xff\xff\xffno model", ["is not a SentencePiece model"]),
    (b"", ["not a SentencePiece model of type BPE"]),
    (lambda: sentencepiece_model(model_type="unigram", vocab_size=400), ["not a SentencePiece model of type BPE"]),
    (lambda: sentencepiece_model(normalization_rule_name="nmt_nfkc"), ["rewrites characters"]),
    (lambda: sentencepiece_model(remove_extra_whitespaces=True), ["rewrites characters or spaces"]),
])
def test_bad_sentencepiece_models(tmp_path, model, words):
    (tmp_path / "tokenizer.model").write_bytes(model() if callable(model) else model)
    with pytest.raises(ValueError) as error:
        load_hf_tokenizer(tmp_path, ROWS)
    assert all(word in str(error.value) for word in ["tokenizer.model", *words]), error.value


CHAT_MARKS = {"<|im_end|>": 420, "<|im_start|>": 421}  # after the 420 pieces of the SentencePiece model


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_chat_marks_beside_a_bare_sentencepiece_model(tmp_path, place):
    decoder = {str(token): {"content": text, "special": True} for text, token in CHAT_MARKS.items()}
    listed = {"added_tokens_decoder": decoder} if place == "tokenizer_config.json" else {}
    folder = write_folder(tmp_path, None, {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE} | listed)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    if not listed:
        (folder / "added_tokens.json").write_text(json.dumps(CHAT_MARKS | {"[PAD]": ROWS}))
    tokenizer = load_hf_tokenizer(folder, ROWS, use_chat=True)
    assert tokenizer.stop_ids == (420,)
    assert tokenizer.encode_prompt("hi").count(421) == 2  # the user's turn, and the start of the answer
    assert tokenizer.as_text("<|im_end|>") == "< |im_end|>" and tokenizer.token_bytes[421] == b""
    shown = tokenizer.decode_for_reader(tokenizer.encode_prompt("hi"))
    assert shown.count("<|im_start|>") == 2 and shown.count("<|im_end|>") == 1 and "hi" in shown
    assert "<|im_" not in tokenizer.decode(tokenizer.encode_prompt("hi"))


def test_a_mark_without_a_row_in_the_embedding_cannot_be_written(tmp_path):
    """Gemma 3's small models, which read no images, have the tokenizer of those that do."""
    backend = metaspace("gemma")
    size = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    folder = write_folder(tmp_path, backend, settings)
    tokenizer = load_hf_tokenizer(folder, size)
    assert tokenizer.vocab_size == size and tokenizer.encode_fn("<image>") == [size]
    ids = tokenizer.encode_fn(tokenizer.as_text("two  <image> x"))
    assert max(ids) < size and tokenizer.decode(ids) == "two  < image> x"
    with pytest.raises(ValueError, match=f"has {size} tokens but the model has {size - 1} rows"):
        load_hf_tokenizer(folder, size - 1)


def test_tokens_that_only_the_settings_name_are_added_where_they_belong(tmp_path):
    backend = byte_level("qwen2")
    size = backend.get_vocab_size()
    listed = {str(size): {"content": "<|tool|>", "special": True}}
    folder = write_folder(tmp_path / "good", backend, {"eos_token": "<|im_end|>", "added_tokens_decoder": listed})
    assert load_hf_tokenizer(folder, ROWS).encode_fn("<|tool|>") == [size]
    listed = {str(size + 5): {"content": "<|tool|>", "special": True}}
    folder = write_folder(tmp_path / "bad", backend, {"eos_token": "<|im_end|>", "added_tokens_decoder": listed})
    with pytest.raises(ValueError, match=f"lists '<.tool.>' as token {size + 5} beside .* would be {size}: "):
        load_hf_tokenizer(folder, ROWS)


@pytest.mark.parametrize("listed", [
    {"420": None}, {"420": ["<|tool|>"]}, {"420": {"special": True}}, {"first": {"content": "<|tool|>"}},
    {"420": {"content": 7}}, [{"content": "<|tool|>"}],
], ids=["null", "list", "no text", "no id", "number", "no object"])
def test_added_tokens_of_an_unknown_form_are_one_line(tmp_path, listed):
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": listed}
    folder = write_folder(tmp_path, byte_level("qwen2"), settings)
    with pytest.raises(ValueError, match="has added tokens of an unknown form in tokenizer_config.json") as error:
        load_hf_tokenizer(folder, ROWS)
    assert "\n" not in str(error.value)


def test_ids_of_added_tokens_that_are_not_numbers_are_one_line(tmp_path):
    folder = write_folder(tmp_path, byte_level("qwen2"), {"eos_token": "<|im_end|>", "added_tokens_decoder": None})
    (folder / "added_tokens.json").write_text('{"<|tool|>": null}')
    with pytest.raises(ValueError, match="has added tokens of an unknown form"):
        load_hf_tokenizer(folder, ROWS)


def test_a_stop_id_that_stands_for_no_token_is_refused(tmp_path):
    folder = write_folder(tmp_path, byte_level("qwen2"), {}, {"eos_token_id": ROWS - 1})
    with pytest.raises(ValueError, match=rf"has no token {ROWS - 1}, which ends a response: copy all tokenizer files"):
        load_hf_tokenizer(folder, ROWS)


@pytest.mark.parametrize("family", ["qwen2", "llama2"])
def test_tags_of_the_contract_are_text_even_as_special_tokens(tmp_path, family):
    backend = byte_level(family) if family in BYTE_LEVEL else metaspace(family)
    backend.add_special_tokens(list(CONTRACT_SYMBOLS))
    end = "<|im_end|>" if family in BYTE_LEVEL else "</s>"
    tokenizer = load_hf_tokenizer(write_folder(tmp_path, backend, {"eos_token": end, "unk_token": "<unk>"}), ROWS)
    text = "<think><step>3+4=7</step></think><answer>\\boxed{7}</answer>"
    ids = tokenizer.encode_response(text)
    # Llama-2's tokenizer puts a blank before the text after every special token.
    assert tokenizer.decode(ids).replace(" ", "") == text and backend.token_to_id("<step>") in ids
    assert tokenizer.as_text(text + end) == text + end[0] + " " + end[1:]


def test_a_special_token_of_one_character_is_left_out_of_text():
    backend = byte_level("qwen2")
    backend.add_special_tokens(["\x04"])
    tokenizer = make_tokenizer(backend, ROWS, (), (backend.token_to_id("<|im_end|>"),))
    assert tokenizer.as_text("a\x04b<|im_end|>") == "ab< |im_end|>"
    only = dataclasses.replace(tokenizer, special_texts=("\x04",))
    assert only.as_text("a\x04b") == "ab"
