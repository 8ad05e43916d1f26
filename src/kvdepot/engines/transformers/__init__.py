"""The embedded engine: Hugging Face transformers on torch CPU over a depot.

    engine      open a model, answer prompts, stream
    runner      forward passes over the KV memory
    memory      the KV of one request in one run of memory, and the cache layers that look into it
    attention   grouped-query attention without copies of the keys and values
    reuse       what one request reuses, and the account of its tokens
    blocks      block geometry; cutting blocks out of the memory and pasting them back
    support     which models can be cut, and why not
    identify    the identity of what this engine stores
    decoding    sampling, and tokens to text
    events      what an answer consists of
    convert_gguf  the small model, from the form in which it is shipped

An adapter holds no policy: what to store, to load and to drop is the depot's.
"""

from __future__ import annotations

from kvdepot.engines.transformers.engine import EmbeddedEngine
from kvdepot.engines.transformers.events import Event, FirstToken, Result, TextPiece

__all__ = ["EmbeddedEngine", "Event", "FirstToken", "Result", "TextPiece"]
