"""Policy-gradient reinforcement learning for language models, from REINFORCE to GRPO, in plain PyTorch."""
