//! What a server does with a buffer that it has accepted, off the path of packets.

use penstock_aggregation::{Buffer, Serial};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};

/// What stands behind the buffers of a server's jobs. One thread of the daemon calls it, with one buffer after the other.
pub trait Work: Send {
    /// Takes a buffer of sums. Its results, as many bytes, or the reason why there are none go to [`Done::end`]: now or later, from
    /// any thread, in any order. Other buffers do not wait for this one, unless this call does not return.
    fn take(&mut self, buffer: Buffer, done: Done);
}

/// The result is the sum.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums;

impl Work for Sums {
    fn take(&mut self, buffer: Buffer, done: Done) {
        done.end(Ok(buffer.bytes));
    }
}

/// The way back for the outcome of a buffer's work. All workers of the job are told of it. If it is dropped, they are told that the work
/// was lost.
pub struct Done {
    life: Life,
    first: Serial,
    /// Of the buffer.
    bytes: usize,
    back: Option<Box<dyn FnOnce(Ended) + Send>>,
}

/// An epoch of a job. Numbers of epochs come again after 65,536, and the work behind a buffer may take as long as it likes; lives do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) job: u32,
    pub(crate) epoch: u16,
    /// How many epochs the daemon had opened before.
    pub(crate) number: u64,
}

/// The outcome of a buffer's work.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) life: Life,
    pub(crate) first: Serial,
    /// Of the buffer: they are no longer lent.
    pub(crate) bytes: usize,
    pub(crate) outcome: Result<Vec<u8>, String>,
}

impl Done {
    pub(crate) fn new(life: Life, buffer: &Buffer, back: impl FnOnce(Ended) + Send + 'static) -> Done {
        Done { life, first: buffer.first, bytes: buffer.bytes.len(), back: Some(Box::new(back)) }
    }

    /// The number of the buffer's job.
    #[must_use]
    pub fn job(&self) -> u32 {
        self.life.job
    }

    /// The work has ended: with the results, or with the reason why there are none.
    pub fn end(mut self, outcome: Result<Vec<u8>, String>) {
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: Result<Vec<u8>, String>) {
        let Some(back) = self.back.take() else { return };
        let Done { life, first, bytes, .. } = *self;
        let Life { job, epoch, .. } = life;
        if let Err(why) = &outcome {
            log::warn!(
                "penstock: the work behind the buffer from block {first} of job {job}, epoch {epoch}, failed: {why}"
            );
        }
        back(Ended { life, first, bytes, outcome });
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Life { job, epoch, .. }, first) = (self.life, self.first);
        write!(f, "the outcome of the buffer from block {first} of job {job}, epoch {epoch}")
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tell(Err("the work was given up without a result, which is a bug in it; look at the server's log".into()));
    }
}

/// Starts the thread that calls `work`. It ends when the sender is dropped and `work` has returned.
pub(crate) fn start(mut work: Box<dyn Work>) -> std::io::Result<Sender<(Buffer, Done)>> {
    let (sender, buffers) = channel::<(Buffer, Done)>();
    std::thread::Builder::new().name("penstock-work".into()).spawn(move || {
        for (buffer, done) in buffers {
            // A panic drops `done`, which says so. Those that follow are not to suffer from it.
            let _ = catch_unwind(AssertUnwindSafe(|| work.take(buffer, done)));
        }
    })?;
    Ok(sender)
}
