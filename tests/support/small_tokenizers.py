"""Small tokenizers of the published families, trained for the tests and written as their authors publish them."""

import io
import json
from pathlib import Path

import numpy as np
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The sum of 3 and 4 is 7, so the answer is \\boxed{7}. We know that $x^2 + 2x = 12$.",
    "<step>First we count the words.</step>\n<step>Then the letters: there are 1250 of them.</step>\n",
    "def f(x):\n    return [y for y in x if y > 0]\n\n    # the rest of the code is there\n",
    "Les \u00e9l\u00e8ves \u00e9taient l\u00e0; \u6570\u5b66\u6570\u5b66\u662f\u6709\u8da3\u7684, I'm sure they're.",
] * 8
# Qwen2's and Llama-3's rules for words, as in their tokenizer.json.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
SNIPPETS = [
    "the answer", " is ", "\\frac{1}{2}", "$x^2$", "<step>", "</step>", "\n", "\n\n", "\t", "  ", "   ", "12", "3456",
    "0", "e\u0301", "n\u0303o", "\u00e9", "\u00df", "\u6570\u5b66", "\u3002", "\U0001f642",
    "\U0001f468\u200d\U0001f469",
    "\u2265", "\u03c0", "\u0645\u0631", "I'm", "\u2019", "\u00a0", "\u2581", "\u0120", "<0x41>", "a", "Z", "_", "\x00",
]


def random_text(rng: np.random.Generator) -> str:
    """Snippets and single characters from all over Unicode, joined."""
    parts = [SNIPPETS[i] for i in rng.integers(0, len(SNIPPETS), rng.integers(0, 12))]
    points = rng.integers(1, 0x3000, rng.integers(0, 4)).tolist() + rng.integers(0x1F300, 0x1F6FF, 1).tolist()
    parts += [chr(point) for point in points]
    return "".join(rng.permutation(np.array(parts, object)))


def byte_level(family: str) -> Tokenizer:
    """A byte-level BPE tokenizer as Qwen2, Llama-3 or SmolLM2 has it."""
    backend = Tokenizer(models.BPE())
    split = {"qwen2": QWEN2_WORDS, "llama3": LLAMA3_WORDS}.get(family)
    first = pre_tokenizers.Split(Regex(split), "isolated") if split else pre_tokenizers.Digits(individual_digits=True)
    byte_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_split])
    backend.decoder = decoders.ByteLevel()
    in_vocab = CONTROLS if family == "smollm" else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=in_vocab, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if family == "qwen2":
        backend.normalizer = normalizers.NFC()
    if family == "llama3":
        state = json.loads(backend.to_str())
        state["model"]["ignore_merges"] = True
        backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    if family == "llama3":
        bos = (CONTROLS[0], backend.token_to_id(CONTROLS[0]))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return backend


def metaspace(family: str) -> Tokenizer:
    """A BPE tokenizer with byte fallback as Llama-2 (blank put first by its normalizer), Mistral or Gemma (no blank put
    first, runs of blanks among the added tokens) has it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *sorted(state["vocab"], key=state["vocab"].get)]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in state["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if family == "llama2":
        blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(blanks)
    elif family == "gemma":
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.add_tokens([AddedToken("\u2581" * 2, normalized=False)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * (family != "gemma"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def sentencepiece_model(**options) -> bytes:
    """A SentencePiece model of type BPE with byte fallback, as Llama-2 ships it in tokenizer.model."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "character_coverage": 0.995, "hard_vocab_limit": False, "minloglevel": 2,
        "split_digits": True, "allow_whitespace_only_pieces": True,
    }
    lines = [line for text in CORPUS for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **(settings | options)
    )
    return model.getvalue()


def write_folder(folder: Path, backend: Tokenizer | None, settings: dict, generation: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder
