"""GGUF files, llama.cpp's format: configuration, weights, tokenizer and chat template in one file, or in several
shards."""
