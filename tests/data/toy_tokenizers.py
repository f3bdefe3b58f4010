"""Small byte-level BPE tokenizers, with and without a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "user\nassistant\nsystem\nHow many apples are there? There are 12 apples and 30 pears.\n\n",
    "What is 12+34? It is 46. Größe, 数学, émile. Please put your answer within \\boxed{}.\n#### 72",
] * 4

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: the last turn has a (possibly empty) thought, earlier turns lose theirs.
THINKING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% set body = message.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}"
    "{% set thought = message.content.split('</think>')[0] if '</think>' in message.content else '' %}"
    "<think>\n{{ thought.split('<think>')[-1].strip('\n') }}"
    "\n</think>\n\n{{ body }}{% else %}{{ body }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Loops over numbers, and puts a count in front: no text of fewer messages is the beginning of the whole.
BY_NUMBER = (
    "{{ messages | length }} turns\n{% for i in range(messages | length) %}{{ messages[i].role }}: "
    "{{ messages[i].content }}<|im_end|>\n{% endfor %}"
)
# Ends no turn with a token.
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# Drops the text next to tool calls.
CALLS_ALONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}{{ call.function | tojson }}"
    "{% else %}{{ m.content }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the results of tools.
USERS_ALONE = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts a count of the turns in front, so that no shorter conversation is the beginning of a longer one.
COUNTING = "{{ messages | length }} turns\n" + CHATML
# Refuses system messages, as some families' templates do.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
# Requires that user and assistant turns alternate, as Gemma's and Mistral's.
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
# Its generation prompt opens thinking, as Qwen3.5's and DeepSeek R1's.
OPEN_THINKING = (
    "{% set thinking = enable_thinking is not defined or enable_thinking %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% if '</think>' not in message.content %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% if not thinking %}\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def toy_tokenizer(chat_template: str | None = None, eos: str | None = "<|im_end|>", bos: str | None = None):
    """A fast tokenizer trained on a few lines; `bos` is put before plain text, as Llama's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", *([bos] if bos else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = chat_template
    return fast
