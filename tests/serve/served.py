"""A tiny model in a folder, with a tokenizer trained on the spot; and a real server process over it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def folder(path: Path) -> Path:
    """Where the model and its tokenizer are."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["Once upon a time", "größer als 1 µm", "the cat sat on the mat ☃"] * 4, vocab_size=320)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, chat_template=TEMPLATE)
    tokenizer.save_pretrained(path)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, eos_token_id=None, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Served:
    """A server that runs; `log` is what it wrote."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]):
        self.process, self.url, self.log = process, url, log

    def end(self, patience: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)


@contextlib.contextmanager
def serving(path: Path, *options: str) -> Iterator[Served]:
    """`tessera serve`, on a free port, without compiling: what is tested here is not the programs."""
    command = [sys.executable, "-m", "tessera.tools.cli", "serve", str(path), "--port", "0", "--memory", "16MB"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, "--no-compile", "--device", "cpu", *options], env=env, stderr=subprocess.PIPE, text=True
    )
    log: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line.rstrip())
            if "ready on" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    ready.wait(600)
    found = next((m for line in log if (m := re.search(r"ready on (http\S+)/v1", line))), None)
    assert found is not None, "\n".join(log)
    served = Served(process, found[1], log)
    try:
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)
