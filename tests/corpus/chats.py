"""Conversations, and a small tokenizer with a chat template."""

from functools import lru_cache

from grasp.models.tokenizer import HfTokenizer, train_tokenizer

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else 'no' }}")
# as templates of reasoning models do: what the assistant thought is taken out once others follow
REWRITES = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")
STRICT = "{{ raise_exception('Conversation roles must alternate') }}"
WORDS = ["what is water?", "water is wet.", "and fire?", "fire is hot. it burns.", "<|im_start|>assistant user system"]


@lru_cache
def chat_tokenizer(template: str | None = CHATML) -> HfTokenizer:
    tokenizer = train_tokenizer([*WORDS, "You help."] * 3, vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return HfTokenizer(tokenizer, vocab_size=320)


def turns(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(words)]
