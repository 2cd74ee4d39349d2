"""Prompts and verifiable rewards. A task is a class with the methods of `tasks.base.Task`, named by `task._target_`.

Needs numpy and nothing heavier; pyarrow where a file is Parquet.
"""
