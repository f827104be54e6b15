"""The systems side of language-model training: measure it, make it fast, spread it over GPUs."""
