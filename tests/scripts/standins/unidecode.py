"""A stand-in for unidecode."""


def unidecode(text):
    return text
