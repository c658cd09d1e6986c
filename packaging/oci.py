def build(inputs):
    pass
