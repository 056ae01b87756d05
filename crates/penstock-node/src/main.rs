//! `penstock-node`: the daemons without Python.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use penstock_net::log_writer::{self, LogWriter};
use penstock_node::{Config, Daemon, NodeOption, Role, measure};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn main() -> ExitCode {
    let given = command().get_matches();
    env_logger::Builder::new()
        .parse_filters(&std::env::var("PENSTOCK_LOG").unwrap_or_else(|_| "info".into()))
        .format_target(false)
        .target(env_logger::Target::Pipe(Box::new(LogWriter)))
        .init();
    let outcome = match given.subcommand() {
        Some(("aggregator", given)) => serve(Role::Aggregator, given),
        Some(("server", given)) => serve(Role::Server, given),
        Some((_, given)) => measure::Options::from_arg_matches(given)
            .map_err(|error| error.to_string())
            .and_then(|options| measure::run(&options))
            .map(|report| println!("{report}")),
        None => unreachable!("clap asks for a verb"),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            log_writer::flush();
            eprintln!("penstock-node: {message}");
            ExitCode::FAILURE
        }
    }
}

/// What the command line may say.
fn command() -> Command {
    let daemon = |role: Role, about: &'static str| {
        Command::new(role.name()).about(about).args(NodeOption::of(role).map(argument))
    };
    let measure = measure::Options::augment_args(Command::new("measure"))
        .about("Measures one shard beside a loop that only receives and sends")
        .hide(true);
    Command::new("penstock-node")
        .about("In-network aggregation for Penstock: adds what workers push on its way to the server")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(daemon(Role::Aggregator, "Adds what its children push, and forwards one sum"))
        .subcommand(daemon(Role::Server, "Commits sums and returns them: the end of a job's path"))
        .subcommand(measure)
}

fn argument(option: &'static NodeOption) -> Arg {
    let argument = Arg::new(option.name).long(option.name).help(option.help).required(option.name == "listen");
    let Some(value) = option.value else { return argument.action(ArgAction::SetTrue) };
    let argument =
        argument.value_name(value).value_parser(move |text: &str| option.check(text).map(|()| text.to_owned()));
    match option.default {
        Some(default) => argument.default_value(default),
        None => argument,
    }
}

fn serve(role: Role, given: &ArgMatches) -> Result<(), String> {
    let text = |option: &NodeOption| match option.value {
        Some(_) => given.get_one::<String>(option.name).map(String::as_str),
        None => given.get_flag(option.name).then_some(""),
    };
    let texts: Vec<_> = NodeOption::of(role).filter_map(|option| Some((option.name, text(option)?))).collect();
    let mut config = Config::from_options(role, &texts)?;
    if config.secret.is_none() {
        config.secret = secret()?;
    }
    let signals = Arc::new(AtomicUsize::new(0));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let signals = Arc::clone(&signals);
        // SAFETY: the handler adds to an atomic number, which is allowed in a signal handler.
        let registered = unsafe {
            signal_hook::low_level::register(signal, move || {
                signals.fetch_add(1, Ordering::Relaxed);
            })
        };
        registered.map_err(|error| format!("signals cannot be handled: {error}"))?;
    }
    // After the handlers: whoever reads that it listens may end it.
    let daemon = Daemon::start(config).map_err(|error| error.to_string())?;
    let mut draining = false;
    while !daemon.wait(LOOK) {
        let count = signals.load(Ordering::Relaxed);
        if count > 0 && !std::mem::replace(&mut draining, true) {
            log::info!("penstock: {} ends when no sum is half done; a second signal ends it at once", role.name());
            daemon.drain();
        }
        if count > 1 {
            return Err("ended at once".into());
        }
    }
    Ok(())
}

/// That of the environment.
fn secret() -> Result<Option<Vec<u8>>, String> {
    let variable = |name| std::env::var_os(name).filter(|text| !text.is_empty());
    if let Some(secret) = variable("PENSTOCK_SECRET") {
        return Ok(Some(secret.into_encoded_bytes()));
    }
    let Some(path) = variable("PENSTOCK_SECRET_FILE") else { return Ok(None) };
    let secret = penstock_node::read_secret(&path).map_err(|why| format!("PENSTOCK_SECRET_FILE: {why}"))?;
    Ok(Some(secret))
}

/// How long a signal may go unnoticed.
const LOOK: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    /// The program has the options of the table and no others, with their words and defaults.
    #[test]
    fn options_are_those_of_the_table() {
        let program = command();
        program.clone().debug_assert();
        for role in [Role::Aggregator, Role::Server] {
            let verb = program.find_subcommand(role.name()).expect("a verb a role");
            let found: Vec<_> = verb
                .get_arguments()
                .map(|argument| {
                    let default = argument.get_default_values().first().map(|text| text.to_str().unwrap().to_owned());
                    let help = argument.get_help().unwrap().to_string();
                    (argument.get_long().unwrap().to_owned(), default, help)
                })
                .collect();
            let table: Vec<_> = NodeOption::of(role)
                .map(|option| {
                    let default = option.default.filter(|_| option.value.is_some());
                    (option.name.to_owned(), default.map(str::to_owned), option.help.to_owned())
                })
                .collect();
            assert_eq!(found, table);
        }
    }
}
