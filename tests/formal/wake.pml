/* The wake rule and the ranks that it must not strand, for spin.

A second opinion on what lockstep_trio.testing.explorer finds, so nothing here is translated from Python: the client is
written from the table on the first page of lockstep_trio/core/wave.py, the rank from the engine's own rules. Two things
are finer than there: each rank passes the two collectives of a step in its own time, and a caller makes up its mind
whether it may ever abort, so that a request that only an abort would get rid of is found as well.

test_promela.py defines the case: N ranks, 2 or 3; R requests, of which request r is pinned to rank HOMEr for STEPSr
steps; FIRST, 1 if the ranks agree on a drain after step 1 of a wave and not only after every second one; PATIENT, 0 if
every caller may abort, as in the explorer; and a rule by its name in lockstep_trio.testing.rules: OURS, NO_FENCE, ...

What may stay as it is has a label that begins with "end". A rank at a collective for ever, a caller without an answer
and a client that awaits something are thus invalid end states. Wave numbers are absolute: waves end because requests
do. So if spin finds no cycle either, every run comes to rest with everything settled, and that assumes no fairness. */

#define MOST 3      /* requests: those beyond R are never submitted, and change nothing */
#define CAP 12      /* frames on the way in one direction: a d_step that finds no room is an error, it never waits */
#define NOBODY 255  /* whom a START leaves out */
#define HOME(r) ((r) == 0 -> HOME0 : ((r) == 1 -> HOME1 : HOME2))
#define STEPS(r) ((r) == 0 -> STEPS0 : ((r) == 1 -> STEPS1 : STEPS2))
#define ANY(test, k) (test(0, k) || test(1, k) || test(2, k))

mtype = { ADD, ABORT, START, FENCE, OUTPUT, LAST, DONE, FENCED };
mtype = { PROVEN, UNPROVEN, NEXT_FENCE, THIS_FENCE };

chan to_rank[N] = [CAP] of { mtype, byte, byte };  /* ADD(id, steps) ABORT(id, 0) START(wave, left out) FENCE(0, 0) */
chan to_client[N] = [CAP] of { mtype, byte };      /* OUTPUT(id) LAST(id) DONE(wave) FENCED(0) */
hidden byte i;                                     /* for loops within one d_step: no part of any state */

/* ---------------------------------------------------------------------------------------------------- the client */

byte clock;           /* the wave that all ranks are in, or will wake into */
bool stepping;        /* a START for it has left, and no DONE at or above it has come back */
byte unnamed;         /* the lowest wave that no START has named yet; it is only checked */
mtype proof[MOST] = PROVEN;
bool fenced[N];       /* a fence is outstanding */
bool open[MOST];      /* the caller waits for an answer */
byte callers = R;     /* those that do, or will */

#define AWAITED(r, k) (proof[r] != PROVEN && HOME(r) == (k))
#define UNFENCED(r, k) (proof[r] == NEXT_FENCE && HOME(r) == (k))

inline start(left_out) {
#ifdef OURS
  assert(clock >= unnamed);  /* at most one START per value of the clock */
#endif
  unnamed = clock + 1;
  stepping = true;
  for (i : 0 .. N - 1) { to_rank[i]!START(clock, left_out) }
}

inline wake(left_out) {
  if :: !stepping -> start(left_out) :: else fi
}

inline fence(k) {  /* at most one at a time, for all aborts that have no fence yet */
  if
  :: !fenced[k] && ANY(UNFENCED, k) ->
     fenced[k] = true;
     to_rank[k]!FENCE(0, 0);
     for (i : 0 .. MOST - 1) { if :: UNFENCED(i, k) -> proof[i] = THIS_FENCE :: else fi }
  :: else
  fi
}

inline submit(r) {
  open[r] = true;
  to_rank[HOME(r)]!ADD(r, STEPS(r));
#if defined(FLAG_EXCLUDE)
  wake(HOME(r))
#elif defined(RAISE)
  clock++;
  start(NOBODY)
#else
  proof[r] = UNPROVEN;
  wake(NOBODY)
#endif
}

inline abort(r) {
  open[r] = false;
  callers--;
  to_rank[HOME(r)]!ABORT(r, 0);
#ifdef NO_FENCE
  proof[r] = PROVEN
#else
  if :: proof[r] != PROVEN -> proof[r] = NEXT_FENCE; fence(HOME(r)) :: else fi
#endif
}

inline heard_fenced(k) {
  fenced[k] = false;
  for (i : 0 .. MOST - 1) { if :: AWAITED(i, k) && proof[i] == THIS_FENCE -> proof[i] = PROVEN :: else fi }
  fence(k)
}

inline heard_done(k, w) {
  if :: w >= clock -> clock = w + 1; stepping = false :: else fi;
#if defined(WAKE_ON_EVERY_DONE)
  wake(NOBODY)
#elif defined(OURS) || defined(NO_FENCE)
  if :: ANY(AWAITED, k) -> wake(NOBODY) :: else fi
#endif
}

/* ----------------------------------------------------------------------------------------------------- the ranks */

byte wave[N];
bool running[N];
byte left[MOST];  /* steps that a held request still takes; 0: nobody holds it */

/* A step has two collectives, the forward pass and the agreement behind it. Each needs everybody, so whoever is the
last at one knows that all have left the other, and clears it. Behind a step without agreement a rank would not wait;
here it does, which hides nothing: all that it could send meanwhile is the answer to a fence, and to that the client
sends at most the next fence, to the same rank. */
byte in_forward;
byte in_agreement;
bool somebody_holds;
bool drained;
byte steps;       /* of this wave; the same for all, since nobody steps without the others */

#define HELD(r, k) (left[r] > 0 && HOME(r) == (k))
#define AGREES (steps % 2 == 0 || (FIRST && steps == 1))

#define K _pid
active [N] proctype Rank() {  /* the first processes, so that _pid counts them from 0 */
  byte x, y;
end_parked:  /* with work it can always go on, so here it stays without work only */
  do
  :: d_step { to_rank[K]?ADD(x, y) -> left[x] = y; x = 0; y = 0 }
  :: d_step { to_rank[K]?ABORT(x, y) -> left[x] = 0; x = 0 }
  :: d_step { to_rank[K]?FENCE(x, y) -> to_client[K]!FENCED(0) }
  :: d_step {
       to_rank[K]?START(x, y) ->
       if
       :: x >= wave[K] && y != K ->
#ifdef OURS
          assert(x == wave[K]);  /* no START raises a rank's number */
#endif
          wave[K] = x;
          running[K] = true
       :: else
       fi;
       x = 0; y = 0
     }
  :: d_step {
       running[K] || ANY(HELD, K) -> in_forward++;
       if
       :: in_forward == N -> in_agreement = 0; somebody_holds = false; drained = false; steps++
       :: else
       fi
     };
     do  /* an ABORT that has arrived may be applied inside the step, ahead of its place; later it is read again */
     :: d_step { HELD(0, K) && to_rank[K]??[ABORT(0, 0)] -> left[0] = 0 }
     :: d_step { HELD(1, K) && to_rank[K]??[ABORT(1, 0)] -> left[1] = 0 }
     :: d_step { HELD(2, K) && to_rank[K]??[ABORT(2, 0)] -> left[2] = 0 }
     :: d_step {
          in_forward == N ->
          for (i : 0 .. MOST - 1) {
            if
            :: HELD(i, K) && left[i] == 1 -> left[i] = 0; to_client[K]!LAST(i)
            :: HELD(i, K) && left[i] > 1 -> left[i] = left[i] - 1; to_client[K]!OUTPUT(i)
            :: else
            fi
          }
          somebody_holds = somebody_holds || ANY(HELD, K);
          in_agreement++;
          if
          :: in_agreement == N ->
             in_forward = 0;
             drained = AGREES && !somebody_holds;
             steps = (drained -> 0 : steps)
          :: else
          fi
        };
        d_step {
          in_agreement == N -> running[K] = !drained;
          if :: drained -> to_client[K]!DONE(wave[K]); wave[K] = wave[K] + 1 :: else fi
        };
        break
     od
  od
}
#undef K

/* ------------------------------------------------------------------------------------------ what moves the client */

#define K (_pid - N)
active [N] proctype Ear() {
  byte x;
end_silence:
  do
  :: d_step { to_client[K]?OUTPUT(x) -> proof[x] = PROVEN; x = 0 }
  :: d_step {
       to_client[K]?LAST(x) -> proof[x] = PROVEN;
       if :: open[x] -> open[x] = false; callers-- :: else fi;
       x = 0
     }
  :: d_step { to_client[K]?FENCED(x) -> heard_fenced(K) }
  :: d_step { to_client[K]?DONE(x) -> heard_done(K, x); x = 0 }
  od
}

#define ME (_pid - 2 * N)
active [R] proctype Caller() {
  bool patient;
  if
  :: PATIENT -> patient = true  /* it must get its answer */
  :: patient = false            /* it may abort at any time */
  fi;
  d_step { true -> submit(ME) };
  if
  :: !open[ME]
  :: d_step { open[ME] && !patient -> abort(ME) }
  fi
}

active proctype Settled() {  /* once true this stays true: only a submit makes anything else begin */
  (callers == 0 && !stepping && proof[0] == PROVEN && proof[1] == PROVEN && proof[2] == PROVEN
   && !fenced[0] && !fenced[1] && !fenced[N - 1])
}
