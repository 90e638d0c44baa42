# The headers that programs include, each with what it is for (docs/api.md shows the same list). What
# they include comes along when Lockstep is installed, is internal, and may change any day.
set(LOCKSTEP_PUBLIC_HEADERS
  base/deadline.h
  base/error.h
  base/log.h
  comm/call.h
  comm/communicator.h
  comm/world/backends.h
  comm/world/join.h
  data/data_loader.h
  data/tokens/token_format.h
  data/torch_dataset.h
  device/device_manager.h
  distributed/distributed.h
  launch/rank_side/report.h
  mesh/device_mesh.h
  models/generate.h
  models/folders/hugging_face_folder.h
  models/language_model.h
  models/make_model.h
  models/spec/family.h
  models/spec/training_step.h
  multi_node/multi_node_training_manager.h
  nn/context_parallel/context_parallel_attention.h
  nn/layers/activations.h
  nn/layers/cross_entropy.h
  nn/layers/norms.h
  nn/tensor_parallel/tensor_parallel.h
  nn/tensor_parallel/tensor_plan.h
  nn/tensor_parallel/weights_may_wait.h
  optim/adagrad/plain/options.h
  optim/adamw/plain/options.h
  optim/clip.h
  optim/elementwise_optimizer.h
  optim/grad_scaler.h
  optim/lamb/plain/options.h
  optim/lion/plain/options.h
  optim/matrix_optimizer.h
  optim/muon/plain/options.h
  optim/normed_optimizer.h
  optim/optimizer.h
  optim/schedules/schedule.h
  optim/sgd/plain/options.h
  parallel/pipeline/model_parallel.h
  parallel/pipeline/pipe.h
  parallel/pipeline/pipeline.h
  parallel/pipeline/schedule/registry.h
  parallel/pipeline/split_model.h
  parallel/tensor/parallelize_module.h
  plan/measured/trace_step.h
  plan/model_states.h
  recompute/offload_activations.h
  recompute/recompute.h
  recompute/wrap_activation_checkpointing.h
  recovery/checkpointer.h
  recovery/keep_going.h
  recovery/peer_copies.h
  store/client.h
  store/server.h
  train/config/config.h
  train/distributed_trainer.h
  train/fsdp_trainer.h
  train/train_language_model.h)

# lockstep_installed_headers(<variable>): these and whatever of ours they include, relative to the project.
function(lockstep_installed_headers variable)
  set(found "")
  list(TRANSFORM LOCKSTEP_PUBLIC_HEADERS PREPEND lockstep/ OUTPUT_VARIABLE open)
  while(open)
    list(POP_FRONT open header)
    if(header IN_LIST found)
      continue()
    endif()
    list(APPEND found ${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} lines REGEX "^#include <lockstep/")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "#include <(lockstep/[^>]+)>.*" "\\1" included "${line}")
      list(APPEND open ${included})
    endforeach()
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
  endwhile()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()
