"""A task to copy: `cp mlrl/tasks/template.py my_task.py`, change it, run `train/magrpo.py --task my_task.py`."""

from mlrl import Task

ROWS = [
    {"prompt": "What is rain?", "keyword": "water"},
    {"prompt": "Why do birds sing?", "keyword": "birds"},
    {"prompt": "How does a candle burn?", "keyword": "wax"},
    {"prompt": "What does a baker do?", "keyword": "bread"},
]


def brief(item):
    return [{"role": "user", "content": f"Answer in one sentence. {item['prompt']}"}]


def detailed(item):
    return [{"role": "user", "content": f"Answer in three sentences. {item['prompt']}"}]


def reward(brief, detailed, *, batch_items):
    """One number a joint response: half for the keyword in both answers, half for the second being the longer one."""
    word = batch_items[0]["keyword"]
    return [
        0.25 * (word in short.lower()) + 0.25 * (word in long.lower()) + 0.5 * (len(long) > len(short))
        for short, long in zip(brief, detailed, strict=True)
    ]


task = Task(train_dataset=ROWS, eval_dataset=ROWS[:2], formatters=[brief, detailed], reward_func=reward)
