//! Log lines on their way to standard error: who logs never waits for who reads.
//!
//! Standard error is often a pipe, and its reader may stop reading. The threads of event loops and of datagrams log, and a rank
//! whose loop stands still is dead to its peers. So lines wait in a queue, and a thread of its own writes them.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// The target of a logger that writes each line, or a few lines that belong together, with one call of `write`. It never
/// blocks. Lines keep their order. When 1,024 wait, further ones are lost, and a line says how many in their place.
#[derive(Debug)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match Queue::of_this_process() {
            Ok(queue) => queue.push(line),
            // There is no thread to be had, which is worth a wait.
            Err(_) => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits, for 200 ms at most, until standard error has taken the lines that this process has logged. The end of a process does
/// so too, unless it is `_exit`.
pub fn flush() {
    if let Some(queue) = Queue::running() {
        queue.flush(FLUSH_WITHIN);
    }
}

/// How many lines wait beside those that are being written.
const MOST_WAITING: usize = 1024;
/// How long an end waits for a reader of standard error.
const FLUSH_WITHIN: Duration = Duration::from_millis(200);

/// That of the process that has started one last: this one, or the one that it was forked from.
static CURRENT: AtomicPtr<Queue> = AtomicPtr::new(std::ptr::null_mut());

#[derive(Debug)]
struct Queue {
    /// The process that has the thread. A forked child inherits the queue and not the thread.
    pid: u32,
    most_waiting: usize,
    lines: Mutex<Lines>,
    filled: Condvar,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    waiting: Vec<Box<[u8]>>,
    /// How many came after `waiting` was full.
    lost: u64,
    is_writing: bool,
}

impl Queue {
    fn running() -> Option<&'static Queue> {
        // SAFETY: null, or from `Arc::into_raw`; the count of references that it stands for is never given back.
        let queue = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
        queue.filter(|queue| queue.pid == std::process::id())
    }

    /// The one that runs, or a new one. `LogWriter` calls it, and its logger holds a lock meanwhile.
    fn of_this_process() -> io::Result<&'static Queue> {
        if let Some(queue) = Queue::running() {
            return Ok(queue);
        }
        let queue = Queue::start(io::stderr(), MOST_WAITING)?;
        CURRENT.store(Arc::into_raw(queue).cast_mut(), Ordering::Release);
        static AT_EXIT: Once = Once::new();
        // SAFETY: the function is `extern "C"`, does not unwind and lives as long as the program. Where it cannot be registered,
        // the last lines may be lost.
        AT_EXIT.call_once(|| _ = unsafe { libc::atexit(at_exit) });
        Ok(Queue::running().expect("it was started"))
    }

    fn start(to: impl AsFd + Send + 'static, most_waiting: usize) -> io::Result<Arc<Queue>> {
        let queue = Arc::new(Queue {
            pid: std::process::id(),
            most_waiting,
            lines: Mutex::default(),
            filled: Condvar::new(),
            emptied: Condvar::new(),
        });
        let writing = Arc::clone(&queue);
        std::thread::Builder::new().name("penstock-log".into()).spawn(move || writing.write_lines(to))?;
        Ok(queue)
    }

    fn push(&self, line: &[u8]) {
        let mut lines = self.lock();
        if lines.waiting.len() < self.most_waiting {
            lines.waiting.push(line.into());
            self.filled.notify_one();
        } else {
            lines.lost += 1;
        }
    }

    /// Whether all lines were written within `timeout`.
    fn flush(&self, timeout: Duration) -> bool {
        let is_busy = |lines: &mut Lines| lines.is_writing || !lines.waiting.is_empty();
        let waited = self.emptied.wait_timeout_while(self.lock(), timeout, is_busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn write_lines(&self, to: impl AsFd) {
        let mut lines = self.lock();
        loop {
            while lines.waiting.is_empty() {
                lines = self.filled.wait(lines).unwrap_or_else(PoisonError::into_inner);
            }
            let waiting = std::mem::take(&mut lines.waiting);
            let lost = std::mem::take(&mut lines.lost);
            lines.is_writing = true;
            drop(lines);
            for line in waiting {
                write_all(&to, &line);
            }
            if lost > 0 {
                let told = format!("[WARN ] penstock: {lost} log lines are lost here: nobody read standard error\n");
                write_all(&to, told.as_bytes());
            }
            lines = self.lock();
            lines.is_writing = false;
            if lines.waiting.is_empty() {
                self.emptied.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

extern "C" fn at_exit() {
    flush();
}

/// Writes as long as it takes, past the standard library's lock of standard error, which others may need meanwhile. There is
/// nobody to tell of an error.
fn write_all(to: impl AsFd, mut line: &[u8]) {
    while !line.is_empty() {
        match rustix::io::write(&to, line) {
            Ok(count) => line = &line[count..],
            Err(Errno::INTR) => {}
            // The program, or another one with the same pipe or terminal, has set O_NONBLOCK.
            Err(Errno::AGAIN) => _ = poll(&mut [PollFd::new(&to, PollFlags::OUT)], None),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::pipe::pipe;
    use std::fs::File;
    use std::io::{BufRead, BufReader, Read};
    use std::os::fd::OwnedFd;

    /// A pipe, and how many bytes have filled it.
    fn full_pipe() -> (File, OwnedFd, usize) {
        let (read, write) = pipe().unwrap();
        fcntl_setfl(&write, OFlags::NONBLOCK).unwrap();
        let mut filled = 0;
        while let Ok(count) = rustix::io::write(&write, &[b'x'; 4096]) {
            filled += count;
        }
        (read.into(), write, filled)
    }

    /// Nobody waits for a reader. When there is one, it gets the lines in their order, and the number of those that are lost.
    #[test]
    fn full_pipe_holds_up_nobody() {
        for flags in [OFlags::empty(), OFlags::NONBLOCK] {
            let (mut read, write, filled) = full_pipe();
            fcntl_setfl(&write, flags).unwrap();
            let queue = Queue::start(write, 4).unwrap();
            queue.push(b"first\n");
            while !queue.lock().is_writing {
                std::thread::yield_now();
            }
            for number in 0..20 {
                queue.push(format!("{number}\n").as_bytes());
            }
            assert!(!queue.flush(Duration::from_millis(20)), "nobody has read");

            read.read_exact(&mut vec![0; filled]).unwrap();
            assert!(queue.flush(Duration::from_secs(20)));
            queue.push(b"later\n");
            let mut lines = BufReader::new(read).lines().map(Result::unwrap);
            let told = ["first", "0", "1", "2", "3"];
            assert_eq!(lines.by_ref().take(5).collect::<Vec<_>>(), told);
            assert!(lines.next().unwrap().contains("penstock: 16 log lines are lost"));
            assert_eq!(lines.next().unwrap(), "later");
        }
    }

    /// Who has gone takes no lines, and the others' are not held up by that.
    #[test]
    fn broken_pipe_is_no_wait() {
        let (read, write) = pipe().unwrap();
        drop(read);
        let queue = Queue::start(write, 4).unwrap();
        queue.push(b"line\n");
        assert!(queue.flush(Duration::from_secs(20)));
    }
}
