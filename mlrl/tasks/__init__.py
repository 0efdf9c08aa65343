"""The tasks that ship with mlrl: ``--task NAME`` loads ``mlrl.tasks.NAME``."""
