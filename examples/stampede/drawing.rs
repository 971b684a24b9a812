//! What the charts have in common: words and colours.

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind};
use plotters::element::Text;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, IntoFont, RGBColor};

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(crate) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

pub(crate) const INK: RGBColor = RGBColor(31, 35, 40);
pub(crate) const MUTED: RGBColor = RGBColor(101, 109, 118);
pub(crate) const GRID: RGBColor = RGBColor(225, 228, 232);
pub(crate) const GROUND: RGBColor = RGBColor(249, 250, 251);

pub(crate) fn text(
    area: &Area<'_>,
    at: (i32, i32),
    words: &str,
    size: u32,
    ink: RGBColor,
    anchor: HPos,
) -> Drawn {
    styled(area, at, words, size, ink, anchor, FontStyle::Normal)
}

pub(crate) fn bold(area: &Area<'_>, at: (i32, i32), words: &str, size: u32, ink: RGBColor) -> Drawn {
    styled(area, at, words, size, ink, HPos::Left, FontStyle::Bold)
}

fn styled(
    area: &Area<'_>,
    at: (i32, i32),
    words: &str,
    size: u32,
    ink: RGBColor,
    anchor: HPos,
    weight: FontStyle,
) -> Drawn {
    let font = ("Helvetica, Arial, sans-serif", size).into_font().style(weight);
    let style = font.color(&ink).pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(words.to_owned(), at, style))
}
