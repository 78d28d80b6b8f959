"""Text to batches: the embedded corpus, tokenizers, and a loader addressed by step."""
