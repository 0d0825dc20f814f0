# (gelu(x Wg) * x W1) W2 in the tanh form, as Gemma
#   python train.py config/geglu_tanh.py
ffn = 'geglu_tanh'
