"""Gradeline and TRL side by side on the same work: `make bench`, or `make bench WORK=add ROUNDS=1`.

Each measurement is a process of its own; the two sides take turns (A B A B), with the same model, prompts,
sampling, optimizer, precision and threads. Rewards are a hash of the completion, so that every group has spread, and
end tokens are ignored, so that both sides do all the work.
"""
