# gelu(x W1) W2, erf form (Hendrycks & Gimpel 2016)
#   python train.py config/gelu.py
ffn = 'gelu'
