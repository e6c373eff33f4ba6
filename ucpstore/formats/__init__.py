"""Readers (and writers) of other frameworks' checkpoints: one folder per framework, none imports another."""
