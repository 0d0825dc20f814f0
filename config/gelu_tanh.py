# gelu in the tanh form of GPT-2
#   python train.py config/gelu_tanh.py
ffn = 'gelu_tanh'
