//! Proofs that a client has the daemon's secret, and may therefore open jobs.
//!
//! A proof is the HMAC-SHA256 under the secret of `method \n path \n time \n daemon \n body`, in hex; the time is Unix seconds, at
//! most [`MOST_SECONDS`] from the daemon's, and the daemon is the name that it drew when it started and tells in `GET /`. It keeps
//! unauthenticated peers from opening and closing jobs. It hides nothing: an eavesdropper reads the job's key, and can replay the
//! request to the same daemon within the minute, which opens a job that is open already. Another daemon refuses the replay, even
//! if it has the same secret.
//!
//! Why not the daemon's address? A daemon may not know the address that a client uses (a port that a container's host
//! forwards). An attacker who can alter packets on the way can give a client another daemon's name; nothing here prevents
//! that.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// The header with the time in Unix seconds.
pub const TIME_HEADER: &str = "X-Penstock-Time";
/// The header with the proof, 64 hex digits.
pub const PROOF_HEADER: &str = "X-Penstock-Proof";

/// The proof for a request to the daemon that reports the name `daemon` in `GET /`.
#[must_use]
pub fn prove(secret: &[u8], daemon: &str, method: &str, path: &str, time: &str, body: &[u8]) -> String {
    let bytes = mac(secret, daemon, method, path, time, body).finalize().into_bytes();
    hex(&bytes)
}

/// Draws a daemon's name: 32 hex digits, different at each start.
pub(crate) fn draw_name() -> std::io::Result<String> {
    draw().map(|drawn| hex(&drawn))
}

/// 16 random bytes of the kernel.
pub(crate) fn draw() -> std::io::Result<[u8; 16]> {
    let mut drawn = [0u8; 16];
    // Up to 256 bytes come completely, if the call is not interrupted before.
    rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut drawn, rustix::rand::GetRandomFlags::empty()))?;
    Ok(drawn)
}

/// Whether a request may change jobs; the error is for its sender.
pub(crate) fn check(
    secret: &[u8],
    daemon: &str,
    now_unix: u64,
    request: (&str, &str, &[u8]),
    time: Option<&str>,
    proof: Option<&str>,
) -> Result<(), String> {
    let (method, path, body) = request;
    let (Some(time), Some(proof)) = (time, proof) else {
        return Err(format!("this node has a secret: send {TIME_HEADER} and {PROOF_HEADER} (PENSTOCK_SECRET)"));
    };
    let seconds: u64 = time.parse().map_err(|_| format!("{TIME_HEADER} is not a number of seconds"))?;
    let wrong = || {
        "the proof does not hold: is the secret the same on both sides, and is the proof for this daemon (GET / names it)?"
            .to_string()
    };
    let proof = unhex::<32>(proof).ok_or_else(wrong)?;
    mac(secret, daemon, method, path, time, body).verify_slice(&proof).map_err(|_| wrong())?;
    // Only a client with the secret learns the daemon's time.
    if now_unix.abs_diff(seconds) > MOST_SECONDS {
        return Err(format!(
            "the proof is of second {seconds}, it is {now_unix} here; {MOST_SECONDS} s are allowed: are the clocks right?"
        ));
    }
    Ok(())
}

/// Parses `2 N` hex digits.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut out = [0; N];
    for (byte, pair) in out.iter_mut().zip(digits.as_chunks::<2>().0) {
        let value = |digit: u8| (digit as char).to_digit(16).map(|value| value as u8);
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(out)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn mac(secret: &[u8], daemon: &str, method: &str, path: &str, time: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length will do");
    // Only the body may contain line ends.
    for part in [method, path, time, daemon] {
        mac.update(part.as_bytes());
        mac.update(b"\n");
    }
    mac.update(body);
    mac
}

/// How far the clocks of client and daemon may differ.
const MOST_SECONDS: u64 = 60;

#[cfg(test)]
mod tests {
    use super::*;

    /// The proof of this request is valid; with anything changed it is not, and the reason says what to check.
    #[test]
    fn a_proof_is_of_one_request_at_one_time() {
        let request = ("PUT", "/jobs/7?x=1", &b"{}"[..]);
        let proof = prove(b"secret", "d0", request.0, request.1, "1000", request.2);
        // From Python: hmac.new(b"secret", b"PUT\n/jobs/7?x=1\n1000\nd0\n{}", "sha256").hexdigest()
        assert_eq!(proof, EXPECTED);
        let refusal = |secret: &[u8], now, request, time: Option<&str>, proof: Option<&str>| {
            check(secret, "d0", now, request, time, proof).err().unwrap_or_default()
        };
        let good = Some(proof.as_str());
        assert_eq!(refusal(b"secret", 1060, request, Some("1000"), good), "");
        assert_eq!(refusal(b"secret", 940, request, Some("1000"), good), "");
        assert!(check(b"secret", "d1", 1000, request, Some("1000"), good).is_err(), "another daemon's");
        assert!(refusal(b"secret", 1061, request, Some("1000"), good).contains("clocks"));
        assert!(refusal(b"secret", 939, request, Some("1000"), good).contains("clocks"));
        assert!(refusal(b"secret", 1000, request, Some("1001"), good).contains("does not hold"));
        assert!(refusal(b"other", 1000, request, Some("1000"), good).contains("does not hold"));
        assert!(
            refusal(b"secret", 1000, ("DELETE", request.1, request.2), Some("1000"), good).contains("does not hold")
        );
        assert!(
            refusal(b"secret", 1000, ("PUT", "/jobs/8?x=1", request.2), Some("1000"), good).contains("does not hold")
        );
        assert!(refusal(b"secret", 1000, ("PUT", request.1, b"{} "), Some("1000"), good).contains("does not hold"));
        assert!(refusal(b"secret", 1000, request, Some("1000"), Some("12")).contains("does not hold"));
        assert!(refusal(b"secret", 1000, request, Some("soon"), good).contains("not a number"));
        assert!(refusal(b"secret", 1000, request, None, good).contains("PENSTOCK_SECRET"));
        assert!(refusal(b"secret", 1000, request, Some("1000"), None).contains("PENSTOCK_SECRET"));
    }

    const EXPECTED: &str = "8cd9ac5650c203bb6ce9462cff0230229812925f2ea8d3ec7a350620a093aa64";

    /// Two daemons never call themselves the same.
    #[test]
    fn names() {
        let [one, other] = [(); 2].map(|()| draw_name().expect("randomness"));
        assert!(unhex::<16>(&one).is_some() && one != other, "{one} {other}");
    }

    /// Hex digits of either case; nothing else, and no other length.
    #[test]
    fn hex() {
        assert_eq!(unhex::<2>("0aFf"), Some([10, 255]));
        for bad in ["", "0a", "0aff0", "0agf", "+aff", "ää"] {
            assert_eq!(unhex::<2>(bad), None, "{bad}");
        }
    }
}
