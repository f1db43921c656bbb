"""What a run can change, and how it is put back: models, torch's settings, random states.

``tensor_forms`` reads and compares tensors of any layout, ``value_leaves`` walks structures and objects, ``snapshot``
puts a model back, ``model_copy`` copies one, ``torch_state`` puts torch's own settings back.
"""
