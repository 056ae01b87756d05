def get_tokenizer(name, language=None):
    return str.split
