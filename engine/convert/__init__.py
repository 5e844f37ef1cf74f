"""Hugging Face checkpoint to artifact: rounded, laid out for the kernels, streamed in bounded memory."""
