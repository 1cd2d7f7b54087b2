# tensor 8, pipeline 16: 128 devices make one replica
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 \
--micro-batch-size 1 --global-batch-size 1536 --fp16 \
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
