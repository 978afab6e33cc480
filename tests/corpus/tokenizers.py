"""Tiny tokenizers of common kinds: byte-level and SentencePiece-like, with and without special tokens."""

from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from grasp.models.tokenizer import HfTokenizer

BOS, EOS = "<s>", "</s>"
MARKS = ["<|user|>", "<|assistant|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXTS = [
    "Question: what do plants make?\nAnswer: sugar from light.\n",
    "unlikely words, likely words; 12345 and 42\n\n",
    "<|user|>\nhi\n<|assistant|>\nHello there: it is.\n\n",
]
KINDS = ("byte", "byte_trim", "llama3", "prepend", "first", "never", "unigram", "wordpiece")


@lru_cache
def tiny(kind: str, *, bos: bool = False, template: str | None = None) -> HfTokenizer:
    """Return a tokenizer of a kind; with `bos` every text begins with BOS (and of `wordpiece` ends with EOS)."""
    special = ["<unk>", BOS, EOS, *MARKS]
    if kind in ("byte", "byte_trim", "llama3"):
        tokenizer = Tokenizer(models.BPE())
        if kind == "llama3":
            split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
            bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    else:
        model = models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>", byte_fallback=False)
        tokenizer = Tokenizer(model)
        if kind == "prepend":  # as the tokenizer.json of Llama 2
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            scheme = "first" if kind == "unigram" else kind
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "unigram")
        tokenizer.decoder = decoders.Metaspace()
        trainer_class = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
        options = {"unk_token": "<unk>"} if kind == "unigram" else {"max_token_length": 8}
        trainer = trainer_class(vocab_size=200, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    steps = [processors.ByteLevel(trim_offsets=True)] if kind == "byte_trim" else []
    if bos:
        single = f"{BOS} $A" + f" {EOS}" * (kind == "wordpiece")
        ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
        steps.append(processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token="<unk>", chat_template=template
    )
    return HfTokenizer(wrapped, vocab_size=400)


class WithoutOffsets:
    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_with_spans(self, texts):
        return [(ids, None) for ids in self.encode(texts)]
