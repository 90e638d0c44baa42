// Code of LibTorch's that reads a tensor's memory and calls no operator, so that the dispatch key
// does not lead it to the tensor's owner: torch::save() and its kin, and data_ptr().
#pragma once

namespace lockstep::intercept {

// From now on torch::save(), of whatever holds a tensor of ours, asks the owner first: it would
// write next to nothing of one whose memory is not there.
//
// data_ptr<T>() asks nobody, and fails with an error of LibTorch's where there is no memory. That
// error says from now on, before the stack that it shows, how the values are read. pickle_save()
// asks nobody either, and writes nothing of such a tensor.
//
// Both are functions that LibTorch has one of for the process (SetExportModuleExtraFilesHook,
// SetStackTraceFetcher): they take the place of another that was set before.
void hear_of_memory_readers();

}  // namespace lockstep::intercept
