"""Two summaries of one post: agent 0 a short one, agent 1 a fuller one with more words and linked sentences.

The reward (`mlrl.tasks.writing.reward`) is in how the two go together: lengths, different words, shared words, linking
words; at most 2.98. One turn. One agent alone writes both.

    accelerate launch train/magrpo.py --task tldr --task_args dataset=trl-lib/tldr --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.splits import train_and_held_out
from mlrl.tasks.writing.builder import SPLIT, Roles, writing_task
from mlrl.tasks.writing.posts import POSTS
from mlrl.tasks.writing.reward import TLDR

RECOMMENDED = {"num_turns": 1, "num_generations": 4, "max_new_tokens": 256, "temperature": 0.7}

ROLES = Roles(
    name="tldr",
    first="Sum up the post below in one or two plain sentences. A partner writes the longer summary of the same post, "
    "so keep yours short and leave the details to it. Write the summary only.\n\nPost:\n{source}",
    second="Sum up the post below in a full paragraph. A partner writes a summary of one or two sentences, so yours "
    "should be two to three times as long, with a richer choice of words. Link your sentences with transitions such "
    "as because, however, for example, finally. Write the summary only.\n\nPost:\n{source}",
    both="Sum up the post below twice: first in one or two plain sentences, then in a paragraph that is two to three "
    "times as long, has a richer choice of words and links its sentences with transitions such as because, however, "
    f"for example, finally. Put {SPLIT} between the two and write nothing else.\n\nPost:\n{{source}}",
)


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    train_split: str = "train",
    eval_split: str = "test",
    train_size: int | None = 1100,
    eval_size: int | None = None,
) -> Task:
    """The task over rows with a `prompt` field: a file, a hub data set such as trl-lib/tldr, or posts of our own.

    `eval_size` is 1100 of a hub data set and the last tenth of a file where it is not given.
    """
    if dataset is not None and eval_size is None:
        eval_size = 1100
    train, held_out = train_and_held_out(
        data_path,
        dataset,
        splits=(train_split, eval_split),
        sizes=(train_size, eval_size),
        sample=[{"prompt": post} for post in POSTS],
        fields=("prompt",),
    )
    return writing_task(train, held_out, field="prompt", roles=ROLES, rule=TLDR, recommended=RECOMMENDED)
