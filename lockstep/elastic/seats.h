// The launchers that node 0 knows: those of the job, and those that wait to be.
#pragma once

#include <string>
#include <vector>

#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/introduction.h>
#include <lockstep/elastic/meeting.h>

namespace lockstep::elastic {

struct Seat {
  // That it is still here, and with this hub.
  enum class Word { not_asked, asked, given };

  Channel channel;  // closed in node 0's own
  Introduction who;
  int node_rank = -1;   // -1: of no layout yet
  bool ready = true;    // for the next layout: it has no ranks
  bool done = false;    // its ranks have ended well
  bool paused = false;  // its user has the job stand still
  Word word = Word::not_asked;
};

// Node 0's own is the first.
using Seats = std::vector<Seat>;

// Why a launcher cannot take a seat; empty where it can. `first_meeting`: nobody has one for good.
enum class Meeting { first, later };
std::string objection(const Introduction& who, const MeetingOptions& terms, const Seats& seats,
                      Meeting meeting);

// "node rank 2" or "node ranks 1 and 3"; "2 of the node ranks 1-3" where nobody claimed one. Empty
// where nobody is missing.
std::string missing_nodes(const Seats& seats, int num_nodes);

// Numbers the seats anew and puts them in that order; those over `max_nodes` are left without. With
// a fixed number of nodes everybody keeps its number, and who comes gets the one it claims or one
// that is free; otherwise numbers move up, and who comes gets the next.
void number_seats(Seats& seats, const MeetingOptions& terms);

}  // namespace lockstep::elastic
