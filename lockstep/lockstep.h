// Everything that your program may use: the public headers, by what they are for. All other headers
// are internal, and may change any day. docs/api.md says what is in each; include only those that
// you use if your program compiles too slowly.
#pragma once

// Ranks: a job in three lines, and its parts.
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/script_module.h>
#include <lockstep/flight/journal.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/multi_node/multi_node_training_manager.h>
#include <lockstep/observe/slow_ranks.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

// Training: the loop, its data, optimizers and schedules.
#include <lockstep/data/augmented_dataset.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/tokens/token_format.h>
#include <lockstep/data/torch_dataset.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/joined_optimizer.h>
#include <lockstep/optim/matrix_optimizer.h>
#include <lockstep/optim/normed_optimizer.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/distributed_trainer.h>
#include <lockstep/train/engine.h>
#include <lockstep/train/engine_config.h>
#include <lockstep/train/model_options.h>
#include <lockstep/train/own_model.h>
#include <lockstep/train/train_language_model.h>

// Models too large for one device: layers cut among ranks, pipelines of stages, long sequences.
#include <lockstep/nn/context_parallel/context_parallel_attention.h>
#include <lockstep/nn/tensor_parallel/tensor_parallel.h>
#include <lockstep/nn/tensor_parallel/weights_may_wait.h>
#include <lockstep/parallel/pipeline/model_parallel.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/split_model.h>
#include <lockstep/parallel/tensor/parallelize_module.h>
#include <lockstep/parallel/tensor/suggest_tensor_plan.h>

// Memory: activations computed again or kept on the host; what a step takes.
#include <lockstep/plan/measured/trace_step.h>
#include <lockstep/plan/model_states.h>
#include <lockstep/recompute/offload_activations.h>
#include <lockstep/recompute/recompute.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

// Language models, and the layers that they are made of.
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/generate.h>
#include <lockstep/models/language_model.h>
#include <lockstep/models/make_model.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/layers/norms.h>

// Recovery: checkpoints, copies in other ranks' memory, ranks that go on after a loss.
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/recovery/keep_going.h>
#include <lockstep/recovery/peer_copies.h>

// Errors and the log.
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
