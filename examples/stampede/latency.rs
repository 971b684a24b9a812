//! Latencies in order: percentiles, and durations as a person reads them.

use std::time::Duration;

/// The nearest-rank percentile of an ascending list; zero for an empty one.
pub(crate) fn percentile(ascending: &[Duration], percent: f64) -> Duration {
    let rank = (percent / 100.0 * ascending.len() as f64).ceil() as usize;
    ascending.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

/// Three significant digits and the unit that suits them.
pub(crate) fn human(duration: Duration) -> String {
    let nanos = duration.as_nanos() as f64;
    let (value, unit) = match nanos {
        ..999.5 => (nanos, "ns"),
        ..999.5e3 => (nanos / 1e3, "µs"),
        ..999.5e6 => (nanos / 1e6, "ms"),
        _ => (nanos / 1e9, "s"),
    };
    let decimals = match value {
        ..9.995 if unit != "ns" => 2,
        ..99.95 if unit != "ns" => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_members_of_the_list() {
        let list: Vec<_> = (1..=200).map(Duration::from_micros).collect();
        for (percent, micros) in [(0.0, 1), (50.0, 100), (99.0, 198), (99.9, 200), (100.0, 200)] {
            assert_eq!(percentile(&list, percent), Duration::from_micros(micros), "p{percent}");
        }
        assert_eq!(percentile(&[], 99.0), Duration::ZERO);
    }

    #[test]
    fn durations_have_three_digits() {
        for (nanos, text) in [
            (0, "0 ns"),
            (640, "640 ns"),
            (1_234, "1.23 µs"),
            (9_999, "10.0 µs"),
            (45_678, "45.7 µs"),
            (999_700, "1.00 ms"),
            (312_400_000, "312 ms"),
            (1_790_000_000, "1.79 s"),
        ] {
            assert_eq!(human(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
