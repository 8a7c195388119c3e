"""What is refused, by name, before anything would be half-served.

`arguments` judges SGLang's arguments and, through `models`, the model's config before any weight is
read; `built` judges the objects that were really built; `requests` judges one request.
"""
