class _Vocabulary(dict):
    def __call__(self, words):
        return [self[word] for word in words]

    def set_default_index(self, index):
        pass


def build_vocab_from_iterator(sentences, min_freq=1, specials=(), special_first=True):
    words = sorted({word for sentence in sentences for word in sentence})
    return _Vocabulary({word: index for index, word in enumerate([*specials, *words])})
