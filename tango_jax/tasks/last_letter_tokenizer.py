"""The tokenizer of models that learn last_letter from scratch: for the loop, or written out beside an export."""

import re
from pathlib import Path

import sentencepiece
import tokenizers
from ml_collections import ConfigDict
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tango_jax.tasks import last_letter
from tango_jax.text.bpe import METASPACE
from tango_jax.text.tokenizer import train_sentencepiece


def last_letter_model(task: ConfigDict) -> bytes:
    """A SentencePiece model with the letters, and the symbols that problems of the config's sizes need."""
    max_words = max(task.sft_words[1], task.rl_words[1], task.test_words[1])
    return train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(max_words))


def write_last_letter_tokenizer(model: bytes, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a SentencePiece model without merges.

    Such a model takes the longest symbol at each place and a letter where there is none, which is what a pattern of
    alternatives, longest first, does.
    """
    from transformers import PreTrainedTokenizerFast  # a second to import, and only exports need it

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(token) for token in range(processor.vocab_size())]
    unk, bos, eos = (pieces[token] for token in (processor.unk_id(), processor.bos_id(), processor.eos_id()))
    texts = [piece for piece in pieces if piece not in (unk, bos, eos)]
    longest_first = "|".join(re.escape(piece) for piece in sorted(texts, key=len, reverse=True))
    backend = tokenizers.Tokenizer(models.WordLevel({piece: token for token, piece in enumerate(pieces)}, unk))
    backend.normalizer = normalizers.Replace(" ", METASPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(f"{longest_first}|[\\s\\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, processor.bos_id())]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
