"""What both systems are given: a model and a tokenizer on disk, prompts, a reward, sizes."""

import json
import random
import zlib
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lightning.data.demonstrations import arithmetic


@dataclass(frozen=True)
class Setting:
    """Sizes of a model and of its rollouts. Earlier versions read the same fields: keep them."""

    name: str
    prompt: int = 128  # tokens of a prompt, P
    cap: int = 128  # most tokens of a completion
    mean: float | None = 64  # expected length without the cap; None: every completion has `cap` tokens
    group: int = 8  # completions per prompt, K
    prompts: int = 4
    dead: float = 0.0  # share of the prompts whose completions all get the same reward
    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 6
    kl: float = 0.0
    keys: int | None = None  # key heads; None: as many as query heads, which are of size 64
    bf16: bool = False  # whether products are computed in bfloat16, by both systems' own mixed precision
    model: str | None = None  # a directory with a model to take; its prompts are the questions of data=arithmetic

    @property
    def end_ids(self) -> list[int]:
        """As many as make a model without knowledge end after `mean` tokens; the first is the tokenizer's."""
        return list(range(1, 2 + (round(self.vocabulary / self.mean) - 1 if self.mean else 0)))

    def dumps(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None or name == "mean"})

    @classmethod
    def loads(cls, text: str) -> "Setting":
        return cls(**json.loads(text))

    def write(self, directory: Path) -> None:
        """A random Llama whose words are numbers, in Hugging Face format; or links to the files of `model`."""
        if self.model:
            for file in Path(self.model).resolve().iterdir():
                (directory / file.name).symlink_to(file)
            return
        names = ["<pad>", "<end>", *(f"w{i}" for i in range(2, self.vocabulary))]
        words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="<pad>", pad_token="<pad>", eos_token="<end>"
        )
        for text, _ in self.texts(20):
            if len(tokenizer(text)["input_ids"]) != self.prompt:
                raise ValueError(f"{self.name}: a prompt has not {self.prompt} tokens")
        tokenizer.save_pretrained(directory)
        torch.manual_seed(0)
        heads = self.hidden // 64
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.keys or heads,
            max_position_embeddings=max(4096, self.prompt + self.cap),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=self.end_ids,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(eos_token_id=self.end_ids, pad_token_id=0)
        if self.mean is None:  # the only end token is one that is never likely
            with torch.no_grad():
                model.get_input_embeddings().weight[1].zero_()
                model.get_input_embeddings().weight[1, 0] = 0.0
        model.save_pretrained(directory)

    def rows(self, count: int) -> list[tuple[list[int], bool]]:
        """Prompts of exactly `prompt` token ids, or those of `model`; and whether each is dead."""
        if self.model:
            tokenizer = AutoTokenizer.from_pretrained(self.model)
            return [(tokenizer(text)["input_ids"], dead) for text, dead in self.texts(count)]
        chance = random.Random(1)
        lowest, dead = self.end_ids[-1] + 1, round(self.dead * self.prompts)
        ids = [[chance.randrange(lowest, self.vocabulary) for _ in range(self.prompt)] for _ in range(count)]
        return [(prompt, number % self.prompts < dead) for number, prompt in enumerate(ids)]

    def texts(self, count: int) -> list[tuple[str, bool]]:
        """The same prompts as text."""
        if self.model:
            template = AutoTokenizer.from_pretrained(self.model).apply_chat_template
            questions = islice(cycle(arithmetic(2, 12, ["+", "*"], 26, False)), count)
            messages = [[{"role": "user", "content": question}] for question, _ in questions]
            return [(template(one, tokenize=False, add_generation_prompt=True), False) for one in messages]
        return [(" ".join(f"w{token}" for token in ids), dead) for ids, dead in self.rows(count)]


def reward(prompts, completions, dead, **_):
    """Without meaning, yet other for every completion; equal throughout a dead group."""
    return [0.0 if d else zlib.crc32(text.encode()) / 2**32 for text, d in zip(completions, dead, strict=True)]


TINY = Setting("base", prompt=16, cap=8, mean=4, group=4, prompts=2, hidden=64, layers=1, vocabulary=512)
"""Small enough for one step within seconds."""
