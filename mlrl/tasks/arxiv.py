"""An introduction made from an abstract: agent 0 writes background and motivation, agent 1 method and implications.

The reward (`mlrl.tasks.writing.reward`) is in how the two parts go together: lengths, different words, shared words,
linking words; at most 2.98. One turn. One agent alone writes both.

    accelerate launch train/magrpo.py --task arxiv --task_args data_path=abstracts.jsonl --agent_model MODEL
"""

from mlrl import Task
from mlrl.tasks.splits import train_and_held_out
from mlrl.tasks.writing.abstracts import ABSTRACTS
from mlrl.tasks.writing.builder import SPLIT, Roles, writing_task
from mlrl.tasks.writing.reward import ARXIV

RECOMMENDED = {"num_turns": 1, "num_generations": 4, "max_new_tokens": 256, "temperature": 0.7}

ROLES = Roles(
    name="arxiv",
    first="Below is the abstract of a paper. Write the first half of its introduction, background and motivation, in "
    "one paragraph of 130 to 170 words. A partner writes the second half, about the method and what follows from it: "
    "leave these out, keep to the same terms, and link your sentences. Write the paragraph only."
    "\n\nAbstract:\n{source}",
    second="Below is the abstract of a paper. Write the second half of its introduction, the method and what follows "
    "from it, in one paragraph of 180 to 240 words. A partner writes the first half, background and motivation: leave "
    "these out, keep to the same terms, and link your sentences. Write the paragraph only.\n\nAbstract:\n{source}",
    both="Below is the abstract of a paper. Write its introduction in two paragraphs: background, motivation (130 to "
    "170 words), then the method and what follows from it (180 to 240 words). Keep to the same terms and link your "
    f"sentences. Put {SPLIT} between the two and write nothing else.\n\nAbstract:\n{{source}}",
)


def task(
    data_path: str | None = None,
    dataset: str | None = None,
    train_split: str = "train",
    eval_split: str = "val",
    train_size: int | None = 1100,
    eval_size: int | None = None,
) -> Task:
    """The task over rows with an `abstract_text` field: a file, a hub data set, or abstracts of our own.

    On the hub: OpenMLRL/arXiv_abstract. `eval_size` is 1100 of a hub data set and the last tenth of a file where it is
    not given.
    """
    if dataset is not None and eval_size is None:
        eval_size = 1100
    train, held_out = train_and_held_out(
        data_path,
        dataset,
        splits=(train_split, eval_split),
        sizes=(train_size, eval_size),
        sample=[{"abstract_text": abstract} for abstract in ABSTRACTS],
        fields=("abstract_text",),
    )
    return writing_task(train, held_out, field="abstract_text", roles=ROLES, rule=ARXIV, recommended=RECOMMENDED)
