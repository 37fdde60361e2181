"""Trains the embedded needle model (`training.train`), and writes its card (`card`)."""
