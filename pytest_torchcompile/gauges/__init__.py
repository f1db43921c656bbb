"""Instruments beside the ledger: memory, kernels, launches, coverage, replays, autotuning, the GPU itself."""
