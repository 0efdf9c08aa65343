"""What the tasks tldr and arxiv share: text statistics, gated reward, roles, samples."""
