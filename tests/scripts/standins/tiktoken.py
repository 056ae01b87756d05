"""A stand-in for tiktoken: a token a character."""


class _Encoding:
    def encode(self, text, allowed_special=()):
        return [ord(each) % 50 for each in text]

    def decode(self, tokens):
        return "".join(chr(65 + each % 26) for each in tokens)


def get_encoding(name):
    return _Encoding()
