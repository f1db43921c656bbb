"""What a run can change, and how it is put back: models, torch's settings, random states.

``value_leaves`` walks structures and objects and compares tensors of any layout, ``snapshot`` puts a model back,
``model_copy`` copies one, ``torch_state`` puts torch's own settings back.
"""
