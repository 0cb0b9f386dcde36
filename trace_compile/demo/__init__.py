"""The demo: a small MoE policy trained by GRPO with FP4 rollouts, under several recipes. Needs the extra ``rl``."""
