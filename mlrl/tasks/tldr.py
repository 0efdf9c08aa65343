"""Two summaries of one post: agent 0 a short one, agent 1 a fuller one with more words and linked sentences.

The reward (`mlrl.tasks.writing.reward`) is in how the two go together: lengths, different words, shared words, linking
words; at most 2.98. One turn. One agent alone writes both.

    accelerate launch train/magrpo.py --task tldr --task_args dataset=trl-lib/tldr --agent_model MODEL
"""

from mlrl.tasks.writing.builder import SPLIT, Roles, writing_task_function
from mlrl.tasks.writing.posts import POSTS
from mlrl.tasks.writing.reward import TLDR

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

task = writing_task_function("prompt", POSTS, ROLES, TLDR, held_out_split="test")
