"""One network: its backbone and head, LoRA routing, and forwards over prefix trees."""
