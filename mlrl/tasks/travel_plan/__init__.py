"""What the task travel is made of: reference tables, queries, answers, plans, reward."""
