"""What runs inside the sandbox: started as a script by `mlrl.tasks.sandbox`, imports the standard library alone."""
