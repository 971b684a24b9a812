//! Reads the sources and fails when a module uses what is above it, or leaves the room its powers are
//! confined to.
//!
//! ```text
//! cargo test --test layering
//! ```
//!
//! The layers, lowest first, are those of [`LAYERS`]. A file may name `crate::` modules that stand before
//! its own in that list, and its own module with everything inside it. `engine` needs the types of the
//! loader port, and `config` needs the traits of the loader and the executor; therefore `loader` and
//! `executor` stand below `config`, and `engine` above all three. A name taken from the crate root
//! (`crate::Cache`) is a use of `lib`, the top. Test modules and models obey too.
//!
//! Two more rules: `std::sync::atomic` and `loom` are named in `primitive` only, and `unsafe` is written in
//! `primitive`, `table`, `queue`, `flight` and `slot` only. Files called `models.rs` are free of these two: a model
//! spawns loom's threads, and has a witness that it reads and writes by hand.
//!
//! The scanner sees tokens, not types: comments, strings and doc examples do not count, and what a macro
//! builds or a renamed import hides is not seen. Clippy's disallowed types resolve names, and cover the
//! second.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The layers, lowest first.
const LAYERS: [&str; 19] = [
    "primitive",
    "error",
    "clock",
    "hash",
    "table",
    "queue",
    "policy",
    "freshness",
    "flight",
    "slot",
    "observe",
    "loader",
    "executor",
    "config",
    "engine",
    "call",
    "sync",
    "future",
    "lib",
];

const ATOMIC_ROOM: [&str; 1] = ["primitive"];
const UNSAFE_ROOMS: [&str; 5] = ["primitive", "table", "queue", "flight", "slot"];

#[test]
fn the_sources_obey_the_layers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    assert!(files.iter().any(|file| file.ends_with("lib.rs")), "no sources under {}", root.display());

    let mut breaches = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let path = file.strip_prefix(&root).expect("found under the root");
        breaches.extend(scan(&path.to_string_lossy(), &text));
    }
    let report: Vec<String> = breaches.iter().map(Breach::to_string).collect();
    assert!(report.is_empty(), "\n{}\n", report.join("\n"));
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    for entry in entries {
        let path = entry.expect("a readable directory entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
}

// ---- rules
// -----------------------------------------------------------------------------------------------------------

#[derive(Debug, PartialEq, Eq)]
enum Rule {
    /// The file belongs to a module that is not in the list.
    UnknownLayer,
    /// The file names a layer above its own.
    Upward { names: String },
    /// An atomic or the model checker is named outside its room.
    Atomic { names: String },
    /// `unsafe` is written outside its rooms.
    Unsafe,
}

#[derive(Debug, PartialEq, Eq)]
struct Breach {
    file: String,
    line: usize,
    rule: Rule,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "src/{}:{}: ", self.file, self.line)?;
        match &self.rule {
            Rule::UnknownLayer => write!(f, "this module is not in the list of layers"),
            Rule::Upward { names } => write!(f, "`{names}` is above this file's layer"),
            Rule::Atomic { names } => write!(f, "`{names}` is named in {ATOMIC_ROOM:?} only"),
            Rule::Unsafe => write!(f, "`unsafe` is written in {UNSAFE_ROOMS:?} only"),
        }
    }
}

/// All breaches in the file `path` (relative to `src`) with this text.
fn scan(path: &str, text: &str) -> Vec<Breach> {
    let module = module_of(path);
    let layer = module.first().map_or("lib", String::as_str);
    let breach = |line, rule| Breach { file: path.to_owned(), line, rule };
    let Some(height) = height_of(layer) else {
        return vec![breach(1, Rule::UnknownLayer)];
    };

    let model = module.last().is_some_and(|last| last == "models");
    let tokens = tokens(text);
    let mut breaches = Vec::new();
    for name in names(&module, &tokens) {
        match &name.meaning {
            Meaning::Layer(used) => {
                if height_of(used).is_none_or(|used| used > height) {
                    breaches.push(breach(name.line, Rule::Upward { names: name.written }));
                }
            }
            Meaning::Atomic => {
                if !model && !ATOMIC_ROOM.contains(&layer) {
                    breaches.push(breach(name.line, Rule::Atomic { names: name.written }));
                }
            }
        }
    }
    if !model && !UNSAFE_ROOMS.contains(&layer) {
        let written = tokens.iter().filter(|token| token.is("unsafe"));
        breaches.extend(written.map(|token| breach(token.line, Rule::Unsafe)));
    }
    breaches.sort_by_key(|breach| breach.line);
    breaches
}

fn height_of(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|known| *known == layer)
}

/// The module path of a file: empty for the crate root.
fn module_of(path: &str) -> Vec<String> {
    let path = path.strip_suffix(".rs").unwrap_or(path).replace('\\', "/");
    let mut module: Vec<String> = path.split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod") || module == ["lib"] {
        module.pop();
    }
    module
}

// ---- names
// -----------------------------------------------------------------------------------------------------------

#[derive(Debug)]
struct Name {
    line: usize,
    written: String,
    meaning: Meaning,
}

#[derive(Debug)]
enum Meaning {
    /// A module right under the crate root; a name that is none counts as `lib`.
    Layer(String),
    Atomic,
}

/// Every path in the tokens that means something to the rules, groups written out.
fn names(module: &[String], tokens: &[Token]) -> Vec<Name> {
    let mut inside = Scopes::new(module);
    let mut names = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        inside.step(tokens, at);
        if !tokens[at].is_word() {
            at += 1;
            continue;
        }
        let mut paths = Vec::new();
        let end = path(tokens, at, &mut Vec::new(), &mut paths);
        let imported = at > 0 && tokens[at - 1].is("use");
        for Spelled { line, segments } in paths {
            let meaning = meaning(&segments, imported, inside.module());
            names.extend(meaning.map(|meaning| Name { line, written: segments.join("::"), meaning }));
        }
        at = end.max(at + 1);
    }
    names
}

fn meaning(segments: &[String], imported: bool, module: &[String]) -> Option<Meaning> {
    let is = |at: usize, word: &str| segments.get(at).is_some_and(|segment| segment == word);
    if (is(0, "std") || is(0, "core")) && is(1, "sync") && is(2, "atomic") {
        return Some(Meaning::Atomic);
    }
    if is(0, "loom") && (segments.len() > 1 || imported) {
        return Some(Meaning::Atomic);
    }
    if segments.len() < 2 && !(is(0, "crate") && imported) {
        return None;
    }
    let mut base: Vec<&str> = match segments[0].as_str() {
        "crate" => Vec::new(),
        "self" | "super" => module.iter().map(String::as_str).collect(),
        _ => return None,
    };
    let mut rest = segments[usize::from(!is(0, "super"))..].iter().map(String::as_str).peekable();
    while rest.next_if_eq(&"super").is_some() {
        base.pop();
    }
    base.extend(rest.filter(|segment| *segment != "self"));
    let first = base.first().copied().unwrap_or("lib");
    Some(Meaning::Layer(if height_of(first).is_some() { first.to_owned() } else { "lib".to_owned() }))
}

struct Spelled {
    line: usize,
    segments: Vec<String>,
}

/// Reads the path that starts at `at` behind `prefix`, adds every path it spells to `out`, and gives the
/// token after it.
fn path(tokens: &[Token], mut at: usize, prefix: &mut Vec<String>, out: &mut Vec<Spelled>) -> usize {
    let depth = prefix.len();
    let line = tokens.get(at).map_or(0, |token| token.line);
    loop {
        match tokens.get(at) {
            Some(token) if token.is("{") => {
                at = group(tokens, at + 1, prefix, out);
                break;
            }
            Some(token) if token.is_word() || token.is("*") => {
                prefix.push(token.text.clone());
                at += 1;
            }
            _ => {
                out.push(Spelled { line, segments: prefix.clone() });
                break;
            }
        }
        let goes_on = tokens.get(at).is_some_and(|token| token.is("::"))
            && tokens.get(at + 1).is_some_and(|token| token.is_word() || token.is("{") || token.is("*"));
        if !goes_on {
            out.push(Spelled { line, segments: prefix.clone() });
            break;
        }
        at += 1;
    }
    prefix.truncate(depth);
    at
}

/// Reads `a, b::{c}, d as e}` and gives the token after the closing brace.
fn group(tokens: &[Token], mut at: usize, prefix: &mut Vec<String>, out: &mut Vec<Spelled>) -> usize {
    while let Some(token) = tokens.get(at) {
        if token.is("}") {
            return at + 1;
        }
        if token.is("as") {
            at += 2;
        } else if token.is_word() || token.is("{") || token.is("*") {
            at = path(tokens, at, prefix, out);
        } else {
            at += 1;
        }
    }
    at
}

/// Which module a token is in: that of the file and the `mod name { .. }` around it.
struct Scopes {
    module: Vec<String>,
    braces: usize,
    opened_at: Vec<usize>,
}

impl Scopes {
    fn new(module: &[String]) -> Self {
        Self { module: module.to_vec(), braces: 0, opened_at: Vec::new() }
    }

    fn module(&self) -> &[String] {
        &self.module
    }

    fn step(&mut self, tokens: &[Token], at: usize) {
        if tokens[at].is("{") {
            self.braces += 1;
            if at >= 2 && tokens[at - 2].is("mod") && tokens[at - 1].is_word() {
                self.module.push(tokens[at - 1].text.clone());
                self.opened_at.push(self.braces);
            }
        } else if tokens[at].is("}") {
            if self.opened_at.last() == Some(&self.braces) {
                self.opened_at.pop();
                self.module.pop();
            }
            self.braces = self.braces.saturating_sub(1);
        }
    }
}

// ---- tokens
// ----------------------------------------------------------------------------------------------------------

#[derive(Debug)]
struct Token {
    line: usize,
    text: String,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        self.text == text
    }

    fn is_word(&self) -> bool {
        self.text.starts_with(|first: char| first == '_' || first.is_alphabetic())
    }
}

/// Words, `::` and single signs; comments, strings, characters and lifetimes are left out.
fn tokens(text: &str) -> Vec<Token> {
    let mut reader = Reader { rest: text, line: 1 };
    let mut tokens = Vec::new();
    while let Some(next) = reader.rest.chars().next() {
        let line = reader.line;
        if next.is_whitespace() {
            reader.skip(next.len_utf8());
        } else if reader.rest.starts_with("//") {
            reader.skip(reader.rest.find('\n').unwrap_or(reader.rest.len()));
        } else if reader.rest.starts_with("/*") {
            reader.skip_block_comment();
        } else if let Some(quote) = opening_quote(reader.rest) {
            reader.skip_string(quote);
        } else if next == '\'' {
            reader.skip_character_or_lifetime();
        } else if next == '_' || next.is_alphanumeric() {
            let raw = if reader.rest.starts_with("r#") { 2 } else { 0 };
            let word = &reader.rest[raw..];
            let length = word.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(word.len());
            tokens.push(Token { line, text: word[..length].to_owned() });
            reader.skip(raw + length);
        } else {
            let length = if reader.rest.starts_with("::") { 2 } else { next.len_utf8() };
            tokens.push(Token { line, text: reader.rest[..length].to_owned() });
            reader.skip(length);
        }
    }
    tokens
}

/// How a string begins: its opening's length, and for a raw one the number of hashes that close it.
struct Quote {
    opening: usize,
    hashes: Option<usize>,
}

fn opening_quote(rest: &str) -> Option<Quote> {
    let after_prefix = rest.strip_prefix(['b', 'c']).unwrap_or(rest);
    let prefix = rest.len() - after_prefix.len();
    if after_prefix.starts_with('"') {
        return Some(Quote { opening: prefix + 1, hashes: None });
    }
    let raw = after_prefix.strip_prefix('r')?;
    let hashes = raw.len() - raw.trim_start_matches('#').len();
    raw[hashes..].starts_with('"').then_some(Quote { opening: prefix + 1 + hashes + 1, hashes: Some(hashes) })
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) {
        let (skipped, rest) = self.rest.split_at(bytes);
        self.line += skipped.matches('\n').count();
        self.rest = rest;
    }

    fn skip_block_comment(&mut self) {
        let mut depth = 0_usize;
        while !self.rest.is_empty() {
            if self.rest.starts_with("/*") {
                depth += 1;
                self.skip(2);
            } else if self.rest.starts_with("*/") {
                depth -= 1;
                self.skip(2);
                if depth == 0 {
                    return;
                }
            } else {
                self.skip_one();
            }
        }
    }

    fn skip_string(&mut self, quote: Quote) {
        self.skip(quote.opening);
        if let Some(hashes) = quote.hashes {
            let closing = format!("\"{}", "#".repeat(hashes));
            self.skip(self.rest.find(&closing).map_or(self.rest.len(), |at| at + closing.len()));
        } else {
            self.skip_escaped_until('"');
        }
    }

    fn skip_character_or_lifetime(&mut self) {
        self.skip(1);
        let mut ahead = self.rest.chars();
        let is_character = match (ahead.next(), ahead.next()) {
            (Some('\\'), _) => true,
            (_, second) => second == Some('\''),
        };
        if is_character {
            self.skip_escaped_until('\'');
        } else {
            let is_word = |c: char| c == '_' || c.is_alphanumeric();
            self.skip(self.rest.find(|c: char| !is_word(c)).unwrap_or(self.rest.len()));
        }
    }

    fn skip_escaped_until(&mut self, end: char) {
        while let Some(next) = self.rest.chars().next() {
            self.skip_one();
            if next == '\\' {
                self.skip_one();
            } else if next == end {
                return;
            }
        }
    }

    fn skip_one(&mut self) {
        self.skip(self.rest.chars().next().map_or(0, char::len_utf8));
    }
}

// ---- the scanner goes red
// --------------------------------------------------------------------------------------------

#[cfg(test)]
mod scanner {
    use super::{Rule, scan};

    fn upward(path: &str, text: &str) -> Vec<(usize, String)> {
        let named = |rule| match rule {
            Rule::Upward { names } => names,
            other => panic!("{other:?} in {text}"),
        };
        scan(path, text).into_iter().map(|breach| (breach.line, named(breach.rule))).collect()
    }

    fn rules(path: &str, text: &str) -> Vec<Rule> {
        scan(path, text).into_iter().map(|breach| breach.rule).collect()
    }

    #[test]
    fn a_use_of_a_higher_layer_is_found() {
        assert_eq!(upward("slot.rs", "use crate::engine::Engine;"), [(1, "crate::engine::Engine".into())]);
        assert_eq!(upward("primitive.rs", "\nuse crate::error;"), [(2, "crate::error".into())]);
    }

    #[test]
    fn a_use_of_a_lower_layer_or_of_the_own_is_not() {
        assert_eq!(upward("engine.rs", "use crate::{slot::Slot, primitive, engine::sweep::Sweep};"), []);
        assert_eq!(upward("table/growth.rs", "use crate::table::word::Word; use super::word;"), []);
        assert_eq!(upward("engine/audit.rs", "use crate::loader::Loader; use crate::config::Settings;"), []);
        assert_eq!(upward("lib.rs", "pub use crate::sync::X; use crate::engine; crate::Cache::new();"), []);
    }

    #[test]
    fn nested_groups_are_written_out() {
        let text = "use crate::{\n    clock::{Clock, ManualClock as M},\n    \
                    flight::{outcome::{Outcome, self}, *},\n};";
        let found = upward("table/mod.rs", text);
        let names: Vec<&str> = found.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(
            names,
            ["crate::flight::outcome::Outcome", "crate::flight::outcome::self", "crate::flight::*"]
        );
        assert!(found.iter().all(|(line, _)| *line == 3), "{found:?}");
    }

    #[test]
    fn inline_paths_are_found() {
        assert_eq!(upward("queue.rs", "fn f() -> crate::slot::Slot<crate::policy::P> { x }").len(), 2);
        assert_eq!(upward("queue.rs", "let x = Vec::<crate::slot::Slot>::new();").len(), 1);
        assert_eq!(upward("queue.rs", "macro_rules! m { () => { $crate::slot::new() } }").len(), 1);
        assert_eq!(
            upward("queue.rs", "impl<T: crate::slot::Has> X for T where T: ::std::fmt::Debug {}").len(),
            1
        );
    }

    #[test]
    fn relative_paths_are_resolved() {
        assert_eq!(upward("table.rs", "use super::engine::E;"), [(1, "super::engine::E".into())]);
        assert_eq!(upward("table/growth.rs", "use super::super::engine::E;").len(), 1);
        assert_eq!(upward("table/growth.rs", "use super::engine::E;"), []);
        assert_eq!(upward("table/growth.rs", "mod tests { use super::super::word; }"), []);
        assert_eq!(upward("table/growth.rs", "mod tests { fn f() {} } use super::super::slot;").len(), 1);
        assert_eq!(
            upward("table.rs", "mod tests { use super::*; } mod models { use super::super::slot::S; }").len(),
            1
        );
        assert_eq!(upward("table.rs", "use self::super::slot::S;").len(), 1);
    }

    #[test]
    fn the_crate_root_is_the_top() {
        assert_eq!(upward("engine.rs", "use crate::Cache;"), [(1, "crate::Cache".into())]);
        assert_eq!(upward("engine.rs", "use crate::*;").len(), 1);
        assert_eq!(upward("engine.rs", "use crate as quell; use crate::{self as same};").len(), 2);
        assert_eq!(upward("engine.rs", "pub(crate) struct X(pub(in crate::engine) u8);"), []);
    }

    #[test]
    fn test_modules_obey_too() {
        let text = "#[cfg(test)]\nmod tests {\n    use crate::sync::Cache;\n}";
        assert_eq!(upward("slot/mod.rs", text), [(3, "crate::sync::Cache".into())]);
    }

    #[test]
    fn comments_strings_and_lifetimes_do_not_count() {
        let text = r####"
            //! [`crate::engine`] and unsafe
            /* crate::engine /* nested unsafe */ crate::engine */
            const A: &str = "crate::engine \" unsafe"; const B: &str = r#"crate::engine " unsafe"#;
            const C: &[u8] = b"unsafe"; const D: char = '"'; const E: char = '\''; const F: u8 = b'"';
            fn f<'a>(x: &'a str) -> &'a str { x } // unsafe
        "####;
        assert_eq!(rules("error.rs", text), []);
        let text = format!("{text}\nuse crate::engine::E;");
        assert_eq!(upward("error.rs", &text).len(), 1, "the scanner lost its way before the last line");
    }

    #[test]
    fn a_module_that_is_not_in_the_list_is_found() {
        assert_eq!(rules("utils.rs", ""), [Rule::UnknownLayer]);
        assert_eq!(rules("utils/mod.rs", ""), [Rule::UnknownLayer]);
    }

    #[test]
    fn atomics_and_the_model_checker_stay_in_their_room() {
        let red = [
            "use std::sync::atomic::AtomicUsize;",
            "use std::{sync::{Arc, atomic::{self, Ordering}}};",
            "use std::sync::atomic;",
            "fn f(o: core::sync::atomic::Ordering) {}",
            "fn f(o: ::std::sync::atomic::Ordering) {}",
            "use loom;",
            "fn f() { loom::model(|| ()); }",
        ];
        for text in red {
            let found = rules("slot.rs", text);
            assert!(found.iter().any(|rule| matches!(rule, Rule::Atomic { .. })), "{text}");
            assert_eq!(rules("primitive/atomic.rs", text), [], "{text}");
        }
        let green = [
            "use crate::primitive::sync::atomic::AtomicUsize;",
            "#[cfg(all(test, loom))] mod models { use crate::primitive::model; }",
            "use std::sync::Arc;",
        ];
        for text in green {
            assert_eq!(rules("slot.rs", text), [], "{text}");
        }
    }

    #[test]
    fn unsafe_stays_in_its_rooms() {
        let text = "#![deny(unsafe_code)]\nunsafe impl Send for X {}";
        let found = scan("engine.rs", text);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, &found[0].rule), (2, &Rule::Unsafe));
        for room in ["primitive.rs", "table/growth.rs", "queue.rs", "flight/mod.rs", "slot.rs"] {
            assert_eq!(rules(room, text), [], "{room}");
        }
    }

    #[test]
    fn a_model_is_free_of_the_rooms_but_not_of_the_layers() {
        let text = "unsafe impl Send for X {}\nuse loom::thread;\nuse crate::engine::Engine;";
        assert_eq!(scan("table/models.rs", text).len(), 1);
        assert_eq!(scan("engine/models.rs", text).len(), 0);
    }

    #[test]
    fn a_breach_says_where_and_what() {
        let found = scan("table/growth.rs", "\n\nuse crate::engine::Engine;");
        assert_eq!(
            found[0].to_string(),
            "src/table/growth.rs:3: `crate::engine::Engine` is above this file's layer"
        );
    }
}
