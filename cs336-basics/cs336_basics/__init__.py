"""The Transformer language model, its losses, AdamW and batching."""
