"""An introduction made from an abstract: agent 0 writes background and motivation, agent 1 method and implications.

The reward (`mlrl.tasks.writing.reward`) is in how the two parts go together: lengths, different words, shared words,
linking words; at most 2.98. One turn. One agent alone writes both. On the hub: OpenMLRL/arXiv_abstract.

    accelerate launch train/magrpo.py --task arxiv --task_args data_path=abstracts.jsonl --agent_model MODEL
"""

from mlrl.tasks.writing.abstracts import ABSTRACTS
from mlrl.tasks.writing.builder import SPLIT, Roles, writing_task_function
from mlrl.tasks.writing.reward import ARXIV

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

task = writing_task_function("abstract_text", ABSTRACTS, ROLES, ARXIV, held_out_split="val")
