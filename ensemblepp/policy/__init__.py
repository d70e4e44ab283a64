"""Policy-update mathematics for LLM reinforcement learning: pure functions on log-probabilities and masks."""
